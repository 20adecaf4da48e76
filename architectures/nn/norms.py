"""RMS normalisation, computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """`x / rms(x) * weight` over the last axis; the weight is kept in float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        self.epsilon = epsilon
        self.weight = nnx.Param(jnp.ones((size,), jnp.float32))

    def __call__(self, x: Float[Array, "*axes size"]) -> Float[Array, "*axes size"]:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon)
        weight = jnp.expand_dims(self.weight[...], tuple(range(x.ndim - 1)))
        return (wide * scale * weight).astype(x.dtype)
