"""One Qwen3-style layer of a block draft. The block slots attend to the context and to the block."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dspark_jax.architectures.nn.attention.block_context import BlockContext
from dspark_jax.architectures.nn.mlp import GatedMLP
from dspark_jax.architectures.nn.norms import RMSNorm
from dspark_jax.architectures.nn.rotary import Angles, rotate
from dspark_jax.speculators_common.formats.draft_config import DraftConfig
from dspark_jax.speculators_common.numerics.linear import Linear
from dspark_jax.speculators_common.numerics.platform import Platform


class BlockAttention(nnx.Module):
    """Attention with queries from the block, and keys and values from the context and the block.

    Context and block use the same key and value projections. Keys and values are one kernel. The query kernel is
    separate, because the context needs keys and values only.
    """

    def __init__(
        self, config: DraftConfig, layer: int, *, dtype: DTypeLike, platform: Platform, rngs: nnx.Rngs
    ) -> None:
        self.layer, self.mask, self.origin = layer, config.layers[layer], config.window_origin
        self.head_dim, self.num_kv_heads = config.head_dim, config.num_key_value_heads
        self.scale = config.head_dim**-0.5
        query_width, key_width = (
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        )
        self.query = Linear(
            config.hidden_size, query_width, bias=config.attention_bias, dtype=dtype, platform=platform, rngs=rngs
        )
        self.key_value = Linear(
            config.hidden_size, 2 * key_width, bias=config.attention_bias, dtype=dtype, platform=platform, rngs=rngs
        )
        self.output = Linear(
            query_width, config.hidden_size, bias=config.attention_bias, dtype=dtype, platform=platform, rngs=rngs
        )
        self.query_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.key_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def keys_values(
        self, x: Float[Array, "*axes d"], angles: Angles
    ) -> tuple[Float[Array, "*axes K hd"], Float[Array, "*axes K hd"]]:
        """Keys (normed and rotated) and values of `x`: context features, or the block after the input norm."""
        heads = self.key_value.float32(x).reshape(*x.shape[:-1], 2 * self.num_kv_heads, self.head_dim)
        keys, values = jnp.split(heads, 2, axis=-2)
        return rotate(self.key_norm(keys), angles), values

    def __call__(
        self, x: Float[Array, "B W d"], angles: Angles, context: BlockContext, num_queries: int
    ) -> Float[Array, "B Wq d"]:
        keys, values = self.keys_values(x, angles)
        querying = x[:, :num_queries]
        query = self.query_norm(self.query.float32(querying).reshape(*querying.shape[:-1], -1, self.head_dim))
        query = rotate(query, (angles[0][:, :num_queries], angles[1][:, :num_queries]))
        attended = context.block_attention(
            self.layer, query, keys, values, mask=self.mask, origin=self.origin, scale=self.scale
        )
        return self.output(attended.reshape(*querying.shape[:-1], -1))


class BlockLayer(nnx.Module):
    """`x += attention(norm(x)); x += mlp(norm(x))` over the block slots."""

    def __init__(
        self, config: DraftConfig, layer: int, *, dtype: DTypeLike, platform: Platform, rngs: nnx.Rngs
    ) -> None:
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = BlockAttention(config, layer, dtype=dtype, platform=platform, rngs=rngs)
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, dtype=dtype, platform=platform, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B W d"], angles: Angles, context: BlockContext, num_queries: int
    ) -> Float[Array, "B Wq d"]:
        """The first `num_queries` slots after this layer. All slots are keys."""
        with jax.named_scope("attention"):
            x = x[:, :num_queries] + self.attention(self.input_norm(x), angles, context, num_queries)
        with jax.named_scope("mlp"):
            return x + self.mlp(self.post_attention_norm(x))
