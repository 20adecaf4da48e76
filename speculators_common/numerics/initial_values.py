"""The random values that new parameters begin with. A checkpoint replaces them."""

from __future__ import annotations

import functools

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key, UInt32

_DEVIATION = 0.02


def initial_values(shape: tuple[int, ...], dtype: DTypeLike, rngs: nnx.Rngs) -> Float[Array, "..."]:
    """Normally distributed values of `dtype` from the next key of `rngs.params`; the standard deviation is 0.02."""
    stream = rngs.params
    values = _drawn(stream.key[...], stream.count[...], shape, dtype)
    # As `rngs.params()` counts, except that the variable is replaced and not assigned to. Where a module is built
    # abstractly, an assignment takes longer than all the rest.
    stream.count.set_value(stream.count[...] + 1)
    return values


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _drawn(
    key: Key[Array, ""], count: UInt32[Array, ""], shape: tuple[int, ...], dtype: DTypeLike
) -> Float[Array, "..."]:
    return _DEVIATION * jax.random.normal(jax.random.fold_in(key, count), shape, dtype)
