"""Arrays that are gathered or scattered by rows: conversion between their values and the stored dtype.

`Platform.row_dtype` gives the stored dtype. Embeddings, Markov W1, experts and KV pages are stored like this.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped

_BITS = np.dtype(np.uint16)


def encode_rows(values: Shaped[Array, "..."], row_dtype: DTypeLike) -> Shaped[Array, "..."]:
    """`values` as an array of `row_dtype`; for uint16, the bit patterns of `values` rounded to bfloat16."""
    if np.dtype(row_dtype) == _BITS:
        return jax.lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)
    return values.astype(row_dtype)


def decode_rows(stored: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """The values of a stored array: uint16 bit patterns become bfloat16 by a bitcast, other arrays are unchanged."""
    if stored.dtype == _BITS:
        return jax.lax.bitcast_convert_type(stored, jnp.bfloat16)
    return stored
