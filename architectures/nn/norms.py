"""RMS normalisation, computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


def rms_normalised(x: Float[Array, "*axes size"], epsilon: float) -> Float[Array, "*axes size"]:
    """`x / rms(x)` over the last axis, float32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)


class RMSNorm(nnx.Module):
    """`x / rms(x) * weight` over the last axis; the weight is kept in float32.

    Families that scale by `1 + weight` add the one when they load it.
    """

    def __init__(self, size: int, epsilon: float) -> None:
        self.epsilon = epsilon
        self.weight = nnx.Param(jnp.ones((size,), jnp.float32))

    def __call__(self, x: Float[Array, "*axes size"]) -> Float[Array, "*axes size"]:
        weight = jnp.expand_dims(self.weight[...], tuple(range(x.ndim - 1)))
        return (rms_normalised(x, self.epsilon) * weight).astype(x.dtype)
