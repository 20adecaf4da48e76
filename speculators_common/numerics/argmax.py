"""Argmax over the last axis, in the form that a platform runs fastest."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from dspark_jax.speculators_common.numerics.platform import ArgmaxForm

_BLOCK = 64


def argmax(logits: Float[Array, "*axes V"], form: ArgmaxForm) -> Int32[Array, "*axes"]:
    """Index of the largest entry of the last axis; the first one on ties. A NaN row gives an arbitrary valid index.

    `plain` is `jnp.argmax`. `blockwise` gives the same index in three steps: the maximum of every block of 64 entries,
    the first block with the largest maximum, the first entry of that block with this value. XLA:CPU vectorises a
    maximum but not an argmax, so this is six times faster there for 49,152 entries.
    """
    size = logits.shape[-1]
    if form == "plain" or size % _BLOCK or size <= _BLOCK:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    blocks = logits.reshape(*logits.shape[:-1], size // _BLOCK, _BLOCK)
    block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1).astype(jnp.int32)
    inside = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    return block * _BLOCK + jnp.argmax(inside, axis=-1).astype(jnp.int32)
