"""Argmax, in the form that suits the platform."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from dspark_jax.speculators_common.numerics.platform import ArgmaxForm

_BLOCK = 64


def argmax(logits: Float[Array, "*axes V"], form: ArgmaxForm) -> Int32[Array, "*axes"]:
    """Index of the largest entry of the last axis, the first one on ties. A NaN row gives an arbitrary valid index.

    `plain` is `jnp.argmax`. `blockwise` gives the same index by the maximum of blocks of 64, then the first block that
    holds it, then the first entry inside: XLA:CPU vectorises maxima, not argmaxima, which makes this six times faster
    on a 49,152-word vocabulary.
    """
    size = logits.shape[-1]
    if form == "plain" or size % _BLOCK or size <= _BLOCK:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    blocks = logits.reshape(*logits.shape[:-1], size // _BLOCK, _BLOCK)
    block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1).astype(jnp.int32)
    inside = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    return block * _BLOCK + jnp.argmax(inside, axis=-1).astype(jnp.int32)
