"""The token embedding and the language-model head of a target, tied or not."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from dspark_jax.speculators_common.numerics.initial_values import initial_values
from dspark_jax.speculators_common.numerics.linear import Linear
from dspark_jax.speculators_common.numerics.matmul import output_major_product
from dspark_jax.speculators_common.numerics.platform import Platform
from dspark_jax.speculators_common.numerics.rows import decode_rows, encode_rows


class TokenTable(nnx.Module):
    """Embedding rows `[V, H]`, looked up by token id, stored in `Platform.row_dtype`. Ids are clipped to `0..V-1`."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: DTypeLike, platform: Platform, rngs: nnx.Rngs
    ) -> None:
        rows = initial_values((vocab_size, hidden_size), dtype, rngs)
        self.rows = nnx.Param(encode_rows(rows, platform.row_dtype(dtype)))

    def __call__(self, ids: Int32[Array, "*axes"]) -> Float[Array, "*axes H"]:
        return decode_rows(jnp.take(self.rows[...], ids, axis=0, mode="clip"))


def soft_capped(logits: Float[Array, "*axes V"], cap: float | None) -> Float[Array, "*axes V"]:
    """`cap * tanh(logits / cap)`; the logits themselves if `cap` is `None`."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


class EmbeddingAndHead(nnx.Module):
    """The embedding and the head of a target, without scaling and soft-cap: a `TargetTables` that drafts can use."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, tied: bool, dtype: DTypeLike, platform: Platform, rngs: nnx.Rngs
    ) -> None:
        self.dtype, self.platform = jnp.dtype(dtype), platform
        self.table = TokenTable(vocab_size, hidden_size, dtype=dtype, platform=platform, rngs=rngs)
        self.head = (
            None
            if tied and platform.tied_head_shares_table
            else Linear(hidden_size, vocab_size, dtype=dtype, platform=platform, rngs=rngs)
        )

    def embed_tokens(self, ids: Int32[Array, "*axes"]) -> Float[Array, "*axes H"]:
        """Embedding rows as they are stored, without scaling."""
        return self.table(ids)

    def lm_head(self, hidden: Float[Array, "*axes H"]) -> Float[Array, "*axes V"]:
        """Hidden states times the head, float32, without the soft-cap."""
        if self.head is not None:
            return self.head.float32(hidden)
        return output_major_product(hidden, decode_rows(self.table.rows[...]), self.platform)
