"""Token embeddings and the language-model head, tied or not: the two ends of a target."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from dspark_jax.speculators_common.numerics.matmul import kernel_parameter, linear
from dspark_jax.speculators_common.numerics.storage import decode_rows, encode_rows, row_storage_dtype, runs_on_cpu


class TokenTable(nnx.Module):
    """Embedding rows `[V, H]`, looked up by token id; stored as `row_storage_dtype`."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        rows = 0.02 * jax.random.normal(rngs.params(), (vocab_size, hidden_size), dtype)
        self.rows = nnx.Param(encode_rows(rows, row_storage_dtype(dtype)))

    def __call__(self, ids: Int32[Array, "*axes"]) -> Float[Array, "*axes H"]:
        return decode_rows(jnp.take(self.rows[...], ids, axis=0, mode="clip"))


class Head(nnx.Module):
    """`hidden -> logits`, float32; the kernel is what `kernel_parameter` makes of `[H, V]` values."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.kernel = kernel_parameter(0.02 * jax.random.normal(rngs.params(), (hidden_size, vocab_size), dtype))

    def __call__(self, hidden: Float[Array, "*axes H"]) -> Float[Array, "*axes V"]:
        return linear(hidden, self.kernel)


def tied_logits(hidden: Float[Array, "*axes H"], rows: Float[Array, "V H"]) -> Float[Array, "*axes V"]:
    """`hidden @ rows.T` in float32: the head of a tied model whose table is stored as plain values."""
    return jax.lax.dot_general(
        hidden.astype(rows.dtype), rows, (((hidden.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )


def head_can_share_table() -> bool:
    """Whether a tied head multiplies by the very array that lookups read; on CPU it has a copy of its own.

    There lookups need bit patterns in bfloat16, and a one-row float32 product with the `[V, H]` table runs at half the
    memory bandwidth.
    """
    return not runs_on_cpu()


def soft_capped(logits: Float[Array, "*axes V"], cap: float | None) -> Float[Array, "*axes V"]:
    """`cap * tanh(logits / cap)`; unchanged without a cap."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


class TokenEnds(nnx.Module):
    """The raw tables of a target, which it may lend to a draft."""

    def __init__(self, vocab_size: int, hidden_size: int, *, tied: bool, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.dtype = jnp.dtype(dtype)
        self.table = TokenTable(vocab_size, hidden_size, dtype=dtype, rngs=rngs)
        shares_table = tied and head_can_share_table()
        self.head = None if shares_table else Head(vocab_size, hidden_size, dtype=dtype, rngs=rngs)

    def embed_tokens(self, ids: Int32[Array, "*axes"]) -> Float[Array, "*axes H"]:
        """Embedding rows as stored: no scaling."""
        return self.table(ids)

    def lm_head(self, hidden: Float[Array, "*axes H"]) -> Float[Array, "*axes V"]:
        """Raw head product, float32: no soft-cap."""
        return tied_logits(hidden, self.table.rows[...]) if self.head is None else self.head(hidden)
