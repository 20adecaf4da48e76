"""The target's forward pass with all taps of a draft, the state after the final norm included."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from dspark_jax.architectures.nn.attention.kv_cache import KVCache
from dspark_jax.architectures.nn.attention.ragged_batch import RaggedBatch
from dspark_jax.architectures.protocols import Target
from dspark_jax.speculators_common.formats.draft_config import FINAL, Tap


def tapped_forward(
    target: Target, batch: RaggedBatch, cache: KVCache, taps: tuple[Tap, ...]
) -> tuple[Float[Array, "T H"], Float[Array, "T mH"], KVCache]:
    """`target.forward` with taps of which the last may be `FINAL`.

    `FINAL` is the state after the final norm. `forward` returns it in any case, so targets do not know this tap.
    """
    layers = tuple(tap for tap in taps if isinstance(tap, int))
    hidden, tapped, cache = target.forward(batch, cache, layers)
    if len(layers) == len(taps):
        return hidden, tapped, cache
    assert taps == (*layers, FINAL), taps
    return hidden, jnp.concatenate([tapped, hidden.astype(tapped.dtype)], axis=-1), cache
