"""Attention over paged caches: the plain XLA reference that every platform runs.

Two operations: `paged_attention` for targets (causal over the pages, which already hold the new rows) and
`block_attention` for drafts (context pages plus the block's own keys, which are never written). Scores and softmax are
float32. `BACKEND` names what ran.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dspark_jax.architectures.nn.attention.kv_cache import KVCache
from dspark_jax.architectures.nn.attention.masks import block_mask, causal_mask, context_mask
from dspark_jax.architectures.nn.attention.ragged_batch import RaggedBatch
from dspark_jax.speculators_common.formats.draft_config import LayerMask, WindowOrigin

BACKEND = "xla"
# Finite, so that a query that sees nothing (an inert token) gives a finite, meaningless row instead of NaN.
_HIDDEN = -1e30
_ONES_COLUMNS = (
    8  # one column would be a matrix-vector product, which XLA:CPU sums in an order that depends on the number of rows
)


def paged_attention(
    query: Float[Array, "T N hd"],
    cache: KVCache,
    layer: int,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int | None = None,
) -> Float[Array, "T N hd"]:
    """Causal attention of every token over its row's cached positions, its own included."""
    keys, values = cache.read(layer)
    visible = causal_mask(batch.to_rows(batch.positions), keys.shape[2], window)
    out = _attend(batch.to_rows(query), [(keys, values, visible)], scale)
    return batch.to_flat(out)


def block_attention(
    query: Float[Array, "B Wq N hd"],
    block_keys: Float[Array, "B W K hd"],
    block_values: Float[Array, "B W K hd"],
    cache: KVCache,
    layer: int,
    *,
    mask: LayerMask,
    origin: WindowOrigin,
    scale: float,
) -> Float[Array, "B Wq N hd"]:
    """Attention of block slots at positions `cache.lengths + k` over [context ; block] (paper eq. for the draft layer).

    The first `Wq <= W` slots ask; all `W` slots are keys. The context is strictly before the anchor.
    """
    num_queries, num_slots = query.shape[1], block_keys.shape[1]
    keys, values = cache.read(layer)
    seen_context = context_mask(cache.lengths, num_queries, keys.shape[2], mask, origin)
    seen_block = jnp.broadcast_to(
        block_mask(num_slots, mask, origin)[None, :num_queries], (query.shape[0], num_queries, num_slots)
    )
    own = (block_keys.swapaxes(1, 2).astype(keys.dtype), block_values.swapaxes(1, 2).astype(values.dtype), seen_block)
    return _attend(query, [(keys, values, seen_context), own], scale)


def dense_block_attention(
    query: Float[Array, "B W N hd"],
    block_keys: Float[Array, "B W K hd"],
    block_values: Float[Array, "B W K hd"],
    context_keys: Float[Array, "B L K hd"],
    context_values: Float[Array, "B L K hd"],
    seen_context: Bool[Array, "B L"],
    *,
    scale: float,
) -> Float[Array, "B W N hd"]:
    """The same over a context that is no cache, as in training: a bidirectional block, and the same context rows for
    every slot.
    """
    rows, width = query.shape[:2]
    parts = [
        (
            context_keys.swapaxes(1, 2),
            context_values.swapaxes(1, 2),
            jnp.broadcast_to(seen_context[:, None, :], (rows, width, seen_context.shape[1])),
        ),
        (block_keys.swapaxes(1, 2), block_values.swapaxes(1, 2), jnp.ones((rows, width, width), bool)),
    ]
    return _attend(query, parts, scale)


def _attend(
    query: Float[Array, "B L N hd"],
    parts: list[tuple[Float[Array, "B K _ hd"], Float[Array, "B K _ hd"], Bool[Array, "B L _"]]],
    scale: float,
) -> Float[Array, "B L N hd"]:
    """Softmax attention over the union of several key sets; query head n reads key head `n // (N / K)`."""
    rows, length, num_heads, head_dim = query.shape
    kv_heads = parts[0][0].shape[1]
    group = num_heads // kv_heads
    grouped = query.astype(parts[0][0].dtype).transpose(0, 2, 1, 3).reshape(rows, kv_heads, group * length, head_dim)
    weights = _unscaled_softmax([_masked_scores(grouped, keys, visible, scale) for keys, _, visible in parts])
    out = jnp.zeros(grouped.shape, jnp.float32)
    total = jnp.zeros((*grouped.shape[:-1], 1), jnp.float32)
    for (_, values, _), share in zip(parts, weights, strict=True):
        share = share.astype(values.dtype)
        ones = jnp.ones((share.shape[-1], _ONES_COLUMNS), share.dtype)
        out = out + jnp.einsum("bkqs,bksh->bkqh", share, values, preferred_element_type=jnp.float32)
        total = total + jnp.einsum("bkqs,so->bkqo", share, ones, preferred_element_type=jnp.float32)[..., :1]
    return (out / total).astype(query.dtype).reshape(rows, num_heads, length, head_dim).transpose(0, 2, 1, 3)


def _unscaled_softmax(scores: list[Float[Array, "B K GL _"]]) -> list[Float[Array, "B K GL _"]]:
    """`exp(score - largest score of all sets)`.

    How many rows a step has must not change what any of them becomes: in bfloat16 the last bit decides which way a
    value is rounded, and plain and speculative decoding would part at near-ties. XLA:CPU chooses another exponential
    and another order of summation for a large array that is reduced. So the maximum, which is exact in any order, is
    kept apart from the exponential by a choice that always comes out the same, and the weights are summed by a matrix
    product, whose rows do not depend on each other.
    """
    largest = functools.reduce(jnp.maximum, [jnp.max(part, axis=-1, keepdims=True) for part in scores])
    largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
    return [jnp.exp(part - largest) for part in scores]


def _masked_scores(
    grouped: Float[Array, "B K GL hd"], keys: Float[Array, "B K S hd"], visible: Bool[Array, "B L S"], scale: float
) -> Float[Array, "B K GL S"]:
    rows, kv_heads, queries, _ = grouped.shape
    length, num_keys = visible.shape[1:]
    scores = jnp.einsum("bkqh,bksh->bkqs", grouped, keys, preferred_element_type=jnp.float32) * scale
    per_head = scores.reshape(rows, kv_heads, queries // length, length, num_keys)
    return jnp.where(visible[:, None, None], per_head, _HIDDEN).reshape(scores.shape)
