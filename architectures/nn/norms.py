"""RMS normalisation, computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


def rms_normalised(x: Float[Array, "*axes size"], epsilon: float) -> Float[Array, "*axes size"]:
    """`x / sqrt(mean(x^2) + epsilon)` over the last axis, float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)


class RMSNorm(nnx.Module):
    """`x / sqrt(mean(x^2) + epsilon) * (offset + weight)` over the last axis; the weight is float32.

    `offset` is 1 in families whose files store `gain - 1`. It is added here and not on load, because the sum rounds
    the weight, and the rounded weight could not be saved again bit for bit. The result has the dtype of `x`.
    """

    def __init__(self, size: int, epsilon: float, *, offset: float = 0.0) -> None:
        self.epsilon, self.offset = epsilon, offset
        self.weight = nnx.Param(jnp.full((size,), 1.0 - offset, jnp.float32))

    def __call__(self, x: Float[Array, "*axes size"]) -> Float[Array, "*axes size"]:
        gain = self.offset + self.weight[...] if self.offset else self.weight[...]
        gain = jnp.expand_dims(gain, tuple(range(x.ndim - 1)))
        return (rms_normalised(x, self.epsilon) * gain).astype(x.dtype)
