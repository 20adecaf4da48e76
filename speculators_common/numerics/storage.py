"""Where an array's storage differs from its meaning, and why: the one place that knows about platforms.

XLA:CPU computes bfloat16 gathers, scatters and chained updates in float32: it converts the whole operand, cache or
table, every step. Arrays that are looked up or updated row by row are therefore kept there as uint16 bit patterns and
read through a free bitcast. Matmul operands stay bfloat16. `docs/performance.md` has the figures.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped

_BITS = np.dtype(np.uint16)
_BFLOAT16 = np.dtype(jnp.bfloat16)


def runs_on_cpu() -> bool:
    """Whether compiled programs run on XLA:CPU."""
    return jax.default_backend() == "cpu"


def row_storage_dtype(dtype: DTypeLike) -> np.dtype:
    """Storage dtype of an array of `dtype` that is gathered or scattered by rows."""
    return _BITS if np.dtype(dtype) == _BFLOAT16 and runs_on_cpu() else np.dtype(dtype)


def encode_rows(x: Shaped[Array, "..."], storage: DTypeLike) -> Shaped[Array, "..."]:
    """Values -> what a row-wise array of dtype `storage` holds."""
    if np.dtype(storage) == _BITS:
        return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x.astype(storage)


def decode_rows(stored: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """What a row-wise array holds -> values. Free: a bitcast at most."""
    if stored.dtype == _BITS:
        return jax.lax.bitcast_convert_type(stored, jnp.bfloat16)
    return stored
