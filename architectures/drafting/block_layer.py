"""One Qwen3-style layer of a block draft: the block attends to the context and to itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dspark_jax.architectures.nn.attention.block_context import BlockContext
from dspark_jax.architectures.nn.mlp import GatedMLP
from dspark_jax.architectures.nn.norms import RMSNorm
from dspark_jax.architectures.nn.rotary import rotate
from dspark_jax.speculators_common.formats.draft_config import DraftConfig
from dspark_jax.speculators_common.numerics.linear import Linear
from dspark_jax.speculators_common.numerics.platform import Platform

Angles = tuple[Float[Array, "*axes R"], Float[Array, "*axes R"]]


class BlockAttention(nnx.Module):
    """Queries from the block, keys and values from context and block through the same projections.

    The query kernel stands apart from the fused key/value kernel because context rows need the latter alone.
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
        """Normed, rotated keys and plain values of context features or of normed block rows."""
        heads = self.key_value.float32(x).reshape(*x.shape[:-1], 2 * self.num_kv_heads, self.head_dim)
        keys, values = jnp.split(heads, 2, axis=-2)
        return rotate(self.key_norm(keys), angles), values

    def __call__(
        self, x: Float[Array, "B W d"], angles: Angles, context: BlockContext, num_queries: int
    ) -> Float[Array, "B Wq d"]:
        keys, values = self.keys_values(x, angles)
        asking = x[:, :num_queries]
        query = self.query_norm(self.query.float32(asking).reshape(*asking.shape[:-1], -1, self.head_dim))
        query = rotate(query, (angles[0][:, :num_queries], angles[1][:, :num_queries]))
        attended = context.block_attention(
            self.layer, query, keys, values, mask=self.mask, origin=self.origin, scale=self.scale
        )
        return self.output(attended.reshape(*asking.shape[:-1], -1))


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
        """The first `num_queries` slots after this layer; all slots are keys."""
        with jax.named_scope("attention"):
            x = x[:, :num_queries] + self.attention(self.input_norm(x), angles, context, num_queries)
        with jax.named_scope("mlp"):
            return x + self.mlp(self.post_attention_norm(x))
