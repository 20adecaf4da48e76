"""Matrix products with float32 accumulation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def matmul(x: Float[Array, "*axes in"], kernel: Float[Array, "in out"]) -> Float[Array, "*axes out"]:
    """`x @ kernel`, float32 result. Asking for it is also what keeps XLA:CPU on its fast bfloat16 path."""
    return jnp.matmul(x, kernel, preferred_element_type=jnp.float32)


class Linear(nnx.Module):
    """`x @ kernel (+ bias)` in the dtype of `x`; kernel `[in, out]`, the transpose of what checkpoints store."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(0.02 * jax.random.normal(rngs.params(), (in_features, out_features), dtype))
        self.bias = nnx.Param(jnp.zeros((out_features,), jnp.float32)) if bias else None

    def __call__(self, x: Float[Array, "*axes in"]) -> Float[Array, "*axes out"]:
        return self.wide(x).astype(x.dtype)

    def wide(self, x: Float[Array, "*axes in"]) -> Float[Array, "*axes out"]:
        """The same in float32."""
        out = matmul(x, self.kernel[...])
        return out if self.bias is None else out + jnp.expand_dims(self.bias[...], tuple(range(x.ndim - 1)))
