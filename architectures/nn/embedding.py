"""Token embeddings and the language-model head, tied or not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from dspark_jax.speculators_common.storage import decode_rows, encode_rows, row_storage_dtype


class TokenTable(nnx.Module):
    """Embedding rows `[V, H]`, looked up by token id; stored as `row_storage_dtype`."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        rows = 0.02 * jax.random.normal(rngs.params(), (vocab_size, hidden_size), dtype)
        self.rows = nnx.Param(encode_rows(rows, row_storage_dtype(dtype)))

    def __call__(self, ids: Int32[Array, "*axes"]) -> Float[Array, "*axes H"]:
        return decode_rows(jnp.take(self.rows[...], ids, axis=0, mode="clip"))


class Head(nnx.Module):
    """`hidden -> logits`, float32. The kernel is `[V, H]`, as checkpoints store it, so that a tied head needs no second orientation."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(0.02 * jax.random.normal(rngs.params(), (vocab_size, hidden_size), dtype))

    def __call__(self, hidden: Float[Array, "*axes H"]) -> Float[Array, "*axes V"]:
        return head_logits(hidden, self.kernel[...])


def head_logits(hidden: Float[Array, "*axes H"], kernel: Float[Array, "V H"]) -> Float[Array, "*axes V"]:
    """`hidden @ kernel.T` in float32."""
    return jax.lax.dot_general(hidden, kernel, (((hidden.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def head_can_share_table(dtype: DTypeLike) -> bool:
    """Whether a tied head can multiply by the very array that lookups read; false where lookups need bit patterns."""
    return row_storage_dtype(dtype) == np.dtype(dtype)
