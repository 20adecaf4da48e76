"""Attention masks. Only this file decides which keys a query sees, in decoding and in training.

All positions are absolute. `LayerMask` states the window and the causality of a draft layer. `WindowOrigin` says where
a window is counted from: from the anchor, as the speculators library trains, or from each query slot, as attention
kernels with a built-in window do.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from dspark_jax.speculators_common.formats.draft_config import LayerMask, WindowOrigin


def causal_mask(query_positions: Int32[Array, "B L"], num_keys: int, window: int | None) -> Bool[Array, "B L S"]:
    """The mask of a target: a query at position p sees the keys at positions `p - window < s <= p`.

    `window` is in positions; `None` means that all positions up to p are visible. Key s is at position s.
    """
    key = jnp.arange(num_keys, dtype=jnp.int32)[None, None, :]
    query = query_positions[:, :, None]
    visible = key <= query
    return visible if window is None else visible & (query - key < window)


def context_mask(
    anchor_positions: Int32[Array, "B"],
    num_slots: int,
    key_positions: Int32[Array, "#B S"],
    layer: LayerMask,
    origin: WindowOrigin,
) -> Bool[Array, "B W S"]:
    """The context keys that each block slot sees. All of them are strictly before the anchor.

    `key_positions` are in any order. A negative position means that there is no key. The window starts at
    `anchor - window` if it is counted from the anchor, at `anchor + slot - window + 1` if it is counted from the slot.
    """
    key = key_positions[:, None, :]
    anchor = anchor_positions[:, None, None]
    slot = jnp.arange(num_slots, dtype=jnp.int32)[None, :, None]
    shape = (anchor_positions.shape[0], num_slots, key_positions.shape[1])
    visible = jnp.broadcast_to((key >= 0) & (key < anchor), shape)
    if layer.window is None:
        return visible
    oldest = anchor - layer.window if origin == "anchor" else anchor + slot - layer.window + 1
    return visible & (key >= oldest)


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
