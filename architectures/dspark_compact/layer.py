"""One layer of the compact draft: multi-head attention over context and block without positions, and a gated MLP."""

from __future__ import annotations

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dspark_jax.architectures.nn.attention.block_context import BlockContext
from dspark_jax.architectures.nn.mlp import gelu_tanh
from dspark_jax.architectures.nn.norms import RMSNorm
from dspark_jax.speculators_common.formats.draft_config import DraftConfig
from dspark_jax.speculators_common.numerics.linear import Linear
from dspark_jax.speculators_common.numerics.platform import Platform


class CompactLayer(nnx.Module):
    """`x += attention(norm(x), norm(context)); x += down(gelu(gate(norm(x))) * up(norm(x)))`.

    Unlike the layers of other styles, this one applies its `attention_norm` to the context features as well as to the
    block. Every kernel is one tensor of the file.
    """

    def __init__(
        self, config: DraftConfig, layer: int, *, dtype: DTypeLike, platform: Platform, rngs: nnx.Rngs
    ) -> None:
        hidden, width = config.hidden_size, config.intermediate_size
        self.layer, self.mask, self.origin = layer, config.layers[layer], config.window_origin
        self.head_dim = config.head_dim
        self.attention_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.query, self.key, self.value, self.output = (
            Linear(hidden, hidden, dtype=dtype, platform=platform, rngs=rngs) for _ in range(4)
        )
        self.feed_forward_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.gate, self.up = (Linear(hidden, width, dtype=dtype, platform=platform, rngs=rngs) for _ in range(2))
        self.down = Linear(width, hidden, dtype=dtype, platform=platform, rngs=rngs)

    def context_keys_values(
        self, context: Float[Array, "*axes d"]
    ) -> tuple[Float[Array, "*axes N hd"], Float[Array, "*axes N hd"]]:
        """Keys and values of context features. They do not depend on positions."""
        return self._keys_values(self.attention_norm(context))

    def __call__(self, x: Float[Array, "B W d"], context: BlockContext, num_queries: int) -> Float[Array, "B Wq d"]:
        """The first `num_queries` slots after this layer. All slots are keys."""
        with jax.named_scope("attention"):
            normed = self.attention_norm(x)
            query, (keys, values) = self._heads(self.query(normed[:, :num_queries])), self._keys_values(normed)
            attended = context.block_attention(
                self.layer, query, keys, values, mask=self.mask, origin=self.origin, scale=self.head_dim**-0.5
            )
            x = x[:, :num_queries] + self.output(attended.reshape(*attended.shape[:2], -1))
        return self._fed_forward(x)

    def _keys_values(
        self, normed: Float[Array, "*axes d"]
    ) -> tuple[Float[Array, "*axes N hd"], Float[Array, "*axes N hd"]]:
        return self._heads(self.key(normed)), self._heads(self.value(normed))

    def _heads(self, x: Float[Array, "*axes d"]) -> Float[Array, "*axes N hd"]:
        return x.reshape(*x.shape[:-1], -1, self.head_dim)

    def _fed_forward(self, x: Float[Array, "B W d"]) -> Float[Array, "B W d"]:
        with jax.named_scope("mlp"):
            normed = self.feed_forward_norm(x)
            return x + self.down(gelu_tanh(self.gate(normed)) * self.up(normed))
