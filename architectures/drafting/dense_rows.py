"""Row-batched calls without paged caches: the caller keeps dense context K/V lines and hands them in."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from dspark_jax.architectures.nn.attention.kv_cache import KVCache, KVPages
from dspark_jax.speculators_common.numerics.storage import encode_rows, row_storage_dtype

ContextKV = tuple[tuple[Float[Array, "B K L hd"], Float[Array, "B K L hd"]], ...]


class DraftRows(NamedTuple):
    """What one block gave: `tokens[b, :lengths[b]]` are row b's proposal."""

    tokens: Int32[Array, "B D"]
    confidences: Float[Array, "B D"]  # sigmoid of the head's logits; ones without a head
    lengths: Int32[Array, "B"]
    base_logits: Float[Array, "B D Vd"]  # before the Markov bias


def dense_cache(context_kv: ContextKV, lengths: Int32[Array, "B"]) -> KVCache:
    """Dense lines as pages of their own length: row b owns page b and sees its first `lengths[b]` places."""
    storage = row_storage_dtype(context_kv[0][0].dtype)
    pages = KVPages(
        keys=tuple(encode_rows(keys, storage) for keys, _ in context_kv),
        values=tuple(encode_rows(values, storage) for _, values in context_kv),
    )
    return KVCache(pages=pages, page_table=jnp.arange(lengths.shape[0], dtype=jnp.int32)[:, None], lengths=lengths)
