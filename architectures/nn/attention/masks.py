"""Attention masks. Only this file decides which keys a query sees, in decoding and in training.

All positions are absolute. `LayerMask` states the window and the causality of a draft layer. `WindowOrigin` says where
a window is counted from: from the anchor, as the speculators library trains, or from each query slot, as attention
kernels with a built-in window do.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from dspark_jax.speculators_common.formats.draft_config import LayerMask, WindowOrigin


class VisibleRange(NamedTuple):
    """The positions that each query sees: `first <= position < end`. A query sees nothing if `end <= first`."""

    first: Int32[Array, "B L"]
    end: Int32[Array, "B L"]


def causal_range(query_positions: Int32[Array, "B L"], window: int | None) -> VisibleRange:
    """The positions that a target's query at position p sees: `p - window < s <= p`.

    `window` is in positions; `None` means that all positions up to p are visible.
    """
    end = query_positions + 1
    return VisibleRange(jnp.zeros_like(end) if window is None else jnp.maximum(end - window, 0), end)


def context_range(
    anchor_positions: Int32[Array, "B"], num_slots: int, layer: LayerMask, origin: WindowOrigin
) -> VisibleRange:
    """The context positions that each block slot sees. All of them are strictly before the anchor.

    The window starts at `anchor - window` if it is counted from the anchor, at `anchor + slot - window + 1` if it is
    counted from the slot.
    """
    slot = jnp.arange(num_slots, dtype=jnp.int32)[None, :]
    end = jnp.broadcast_to(anchor_positions[:, None], (anchor_positions.shape[0], num_slots))
    if layer.window is None:
        return VisibleRange(jnp.zeros_like(end), end)
    oldest = end - layer.window if origin == "anchor" else end + slot - layer.window + 1
    return VisibleRange(jnp.maximum(oldest, 0), end)


def causal_mask(query_positions: Int32[Array, "B L"], num_keys: int, window: int | None) -> Bool[Array, "B L S"]:
    """`causal_range` as a mask over keys at the positions `0..num_keys-1`."""
    return _in_range(causal_range(query_positions, window), jnp.arange(num_keys, dtype=jnp.int32)[None])


def context_mask(
    anchor_positions: Int32[Array, "B"],
    num_slots: int,
    key_positions: Int32[Array, "#B S"],
    layer: LayerMask,
    origin: WindowOrigin,
) -> Bool[Array, "B W S"]:
    """`context_range` as a mask over keys at `key_positions`, in any order. Negative: there is no key."""
    return _in_range(context_range(anchor_positions, num_slots, layer, origin), key_positions)


def _in_range(visible: VisibleRange, positions: Int32[Array, "#B S"]) -> Bool[Array, "B L S"]:
    key = positions[:, None, :]
    return (key >= visible.first[..., None]) & (key < visible.end[..., None])


def block_mask(num_slots: int, layer: LayerMask, origin: WindowOrigin) -> Bool[Array, "W W"]:
    """The block slots (last axis) that each block slot (first axis) sees.

    A causal layer sees the slots up to its own. A window that is counted from the slot applies here too, in both
    directions.
    """
    query = jnp.arange(num_slots, dtype=jnp.int32)[:, None]
    key = jnp.arange(num_slots, dtype=jnp.int32)[None, :]
    visible = key <= query if layer.causal else jnp.ones((num_slots, num_slots), bool)
    if layer.window is None or origin == "anchor":
        return visible
    return visible & (jnp.abs(query - key) < layer.window)
