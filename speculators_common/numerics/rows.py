"""Arrays that are read or written by rows: what they mean, and what is stored (`Platform.row_dtype`)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped

_BITS = np.dtype(np.uint16)


def encode_rows(values: Shaped[Array, "..."], row_dtype: DTypeLike) -> Shaped[Array, "..."]:
    """Values -> what an array of `row_dtype` stores; for uint16 the bits of the bfloat16 rounding."""
    if np.dtype(row_dtype) == _BITS:
        return jax.lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)
    return values.astype(row_dtype)


def decode_rows(stored: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """What is stored -> values. Free: a bitcast at most."""
    if stored.dtype == _BITS:
        return jax.lax.bitcast_convert_type(stored, jnp.bfloat16)
    return stored
