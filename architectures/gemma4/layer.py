"""One Gemma 4 layer, as `Gemma4ForCausalLM` of the transformers library computes it.

Values are normed and scores are not scaled. Every attention and feed-forward part has a norm before and after it. A
layer may add an input of its own, and it multiplies its output by a scalar. Axis letter `P`: the width of a layer's own
input.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from dspark_jax.architectures.gemma4.config import Gemma4Config
from dspark_jax.architectures.nn.attention.kv_cache import KVCache
from dspark_jax.architectures.nn.attention.ragged_batch import RaggedBatch
from dspark_jax.architectures.nn.embedding import TokenTable
from dspark_jax.architectures.nn.mlp import GatedMLP, gelu_tanh
from dspark_jax.architectures.nn.norms import RMSNorm, rms_normalised
from dspark_jax.architectures.nn.rotary import Angles, rotate
from dspark_jax.speculators_common.numerics.linear import Linear
from dspark_jax.speculators_common.numerics.platform import Platform


class Gemma4Attention(nnx.Module):
    """Grouped-query attention with scale 1.

    One kernel has the columns of q, then those of k and v as far as the layer has them. A layer that reads the keys and
    values of an earlier layer has neither. A layer whose values are its keys has no columns of v. Values are normed
    without a gain, and they are not rotated.
    """

    def __init__(
        self, config: Gemma4Config, layer: int, *, dtype: DTypeLike, platform: Platform, rngs: nnx.Rngs
    ) -> None:
        self.num_heads, self.epsilon = config.num_attention_heads, config.rms_norm_eps
        self.shape = shape = config.layers[layer]
        projected = (1 if shape.value_is_key else 2) * shape.num_key_value_heads if shape.stores_kv else 0
        self.qkv = Linear(
            config.hidden_size, (self.num_heads + projected) * shape.head_dim, dtype=dtype, platform=platform, rngs=rngs
        )
        self.output = Linear(
            self.num_heads * shape.head_dim, config.hidden_size, dtype=dtype, platform=platform, rngs=rngs
        )
        self.query_norm = RMSNorm(shape.head_dim, config.rms_norm_eps)
        self.key_norm = RMSNorm(shape.head_dim, config.rms_norm_eps) if shape.stores_kv else None

    def __call__(
        self, x: Float[Array, "T H"], angles: Angles, batch: RaggedBatch, cache: KVCache
    ) -> tuple[Float[Array, "T H"], KVCache]:
        shape, num_heads = self.shape, self.num_heads
        # Norms and rotation take float32 input, as in the dense decoder.
        heads = self.qkv.float32(x).reshape(x.shape[0], -1, shape.head_dim)
        query, keys_values = jnp.split(heads, [num_heads], axis=1)
        query = rotate(self.query_norm(query), angles)
        if self.key_norm is not None:
            kv_heads = shape.num_key_value_heads
            key = rotate(self.key_norm(keys_values[:, :kv_heads]), angles)
            value = rms_normalised(keys_values[:, -kv_heads:], self.epsilon)
            cache = cache.write(shape.cache_layer, batch, key, value)
        out = cache.paged_attention(shape.cache_layer, query, batch, scale=1.0, window=shape.window)
        return self.output(out.reshape(x.shape[0], -1)), cache


class PerLayerInputs(nnx.Module):
    """The layers' own inputs: for every token and layer, the sum of an embedding row and a projection.

    `(norm(projection(embedded) / sqrt(H)) + sqrt(P) * table[id]) / sqrt(2)`, where `embedded` is the scaled embedding
    of the token.
    """

    def __init__(self, config: Gemma4Config, *, dtype: DTypeLike, platform: Platform, rngs: nnx.Rngs) -> None:
        self.num_layers, self.size = config.num_hidden_layers, config.per_layer_input_size
        width = self.num_layers * self.size
        self.table = TokenTable(config.per_layer_vocab_size, width, dtype=dtype, platform=platform, rngs=rngs)
        self.projection = Linear(config.hidden_size, width, dtype=dtype, platform=platform, rngs=rngs)
        self.norm = RMSNorm(self.size, config.rms_norm_eps)

    def __call__(self, ids: Int32[Array, "T"], embedded: Float[Array, "T H"]) -> Float[Array, "T layers P"]:
        shape = (ids.shape[0], self.num_layers, self.size)
        rows = self.table(ids).reshape(shape) * self.size**0.5
        projected = self.norm((self.projection.float32(embedded) * embedded.shape[-1] ** -0.5).reshape(shape))
        return (projected.astype(rows.dtype) + rows) * 2**-0.5


class PerLayerGate(nnx.Module):
    """A layer's own input, added to the residual stream: `x + norm(projection(gelu(gate(x)) * layer_input))`."""

    def __init__(self, config: Gemma4Config, *, dtype: DTypeLike, platform: Platform, rngs: nnx.Rngs) -> None:
        self.gate = Linear(config.hidden_size, config.per_layer_input_size, dtype=dtype, platform=platform, rngs=rngs)
        self.projection = Linear(
            config.per_layer_input_size, config.hidden_size, dtype=dtype, platform=platform, rngs=rngs
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def __call__(self, x: Float[Array, "T H"], layer_input: Float[Array, "T P"]) -> Float[Array, "T H"]:
        gated = gelu_tanh(self.gate.float32(x)) * layer_input.astype(jnp.float32)
        return x + self.norm(self.projection(gated.astype(x.dtype)))


class Gemma4Layer(nnx.Module):
    """`x += norm(attention(norm(x))); x += norm(mlp(norm(x))); x = per_layer_gate(x, layer_input); x *= scalar`.

    `per_layer_gate` exists only in models whose layers have inputs of their own.
    """

    def __init__(
        self, config: Gemma4Config, layer: int, *, dtype: DTypeLike, platform: Platform, rngs: nnx.Rngs
    ) -> None:
        hidden, epsilon, width = config.hidden_size, config.rms_norm_eps, config.layers[layer].intermediate_size
        self.input_norm = RMSNorm(hidden, epsilon)
        self.attention = Gemma4Attention(config, layer, dtype=dtype, platform=platform, rngs=rngs)
        self.post_attention_norm = RMSNorm(hidden, epsilon)
        self.pre_feedforward_norm = RMSNorm(hidden, epsilon)
        self.mlp = GatedMLP(hidden, width, activation="gelu_pytorch_tanh", dtype=dtype, platform=platform, rngs=rngs)
        self.post_feedforward_norm = RMSNorm(hidden, epsilon)
        self.per_layer_gate = (
            PerLayerGate(config, dtype=dtype, platform=platform, rngs=rngs) if config.per_layer_input_size else None
        )
        self.scalar = nnx.Param(jnp.ones((1,), dtype))

    def __call__(
        self,
        x: Float[Array, "T H"],
        cache: KVCache,
        *,
        angles: Angles,
        batch: RaggedBatch,
        layer_input: Float[Array, "T P"] | None,
    ) -> tuple[Float[Array, "T H"], KVCache]:
        with jax.named_scope("attention"):
            attended, cache = self.attention(self.input_norm(x), angles, batch, cache)
            x = x + self.post_attention_norm(attended)
        with jax.named_scope("mlp"):
            x = x + self.post_feedforward_norm(self.mlp(self.pre_feedforward_norm(x)))
        if self.per_layer_gate is not None and layer_input is not None:
            with jax.named_scope("per_layer_input"):
                x = self.per_layer_gate(x, layer_input)
        return x * self.scalar[...].astype(x.dtype)[None], cache
