"""The linear layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dspark_jax.speculators_common.numerics.matmul import kernel_parameter, linear


class Linear(nnx.Module):
    """`x @ kernel (+ bias)` in the dtype of `x`; the kernel is what `kernel_parameter` makes of `[in, out]` values."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        self.kernel = kernel_parameter(0.02 * jax.random.normal(rngs.params(), (in_features, out_features), dtype))
        self.bias = nnx.Param(jnp.zeros((out_features,), jnp.float32)) if bias else None

    def __call__(self, x: Float[Array, "*axes in"]) -> Float[Array, "*axes out"]:
        return self.wide(x).astype(x.dtype)

    def wide(self, x: Float[Array, "*axes in"]) -> Float[Array, "*axes out"]:
        """The same in float32."""
        out = linear(x, self.kernel)
        return out if self.bias is None else out + jnp.expand_dims(self.bias[...], tuple(range(x.ndim - 1)))
