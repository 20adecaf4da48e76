"""The linear maps: `Linear` for layers and heads, `LinearStack` for experts."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from dspark_jax.speculators_common.numerics.initial_values import initial_values
from dspark_jax.speculators_common.numerics.matmul import input_major_product, kernel_parameter, kernel_product
from dspark_jax.speculators_common.numerics.platform import Platform
from dspark_jax.speculators_common.numerics.rows import decode_rows, encode_rows


class Linear(nnx.Module):
    """`x @ kernel * scale + bias`, multiplied in the dtype of the kernel and summed in float32.

    `kernel` is stored as `[in, out]` or as its transpose (`kernel_parameter`). `scale` and `bias` are float32 `[out]`,
    or `None`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        scale: bool = False,
        dtype: DTypeLike,
        platform: Platform,
        rngs: nnx.Rngs,
    ) -> None:
        self.platform = platform
        self.kernel = kernel_parameter(initial_values((in_features, out_features), dtype, rngs), platform)
        self.scale = nnx.Param(jnp.ones((out_features,), jnp.float32)) if scale else None
        self.bias = nnx.Param(jnp.zeros((out_features,), jnp.float32)) if bias else None

    def __call__(self, x: Float[Array, "*axes in"]) -> Float[Array, "*axes out"]:
        """The result, rounded to the dtype of `x`."""
        return self.float32(x).astype(x.dtype)

    def float32(self, x: Float[Array, "*axes in"]) -> Float[Array, "*axes out"]:
        """The result in float32, not rounded."""
        out = kernel_product(x, self.kernel, self.platform)
        if self.scale is not None:
            out = out * _along_last_axis(self.scale[...], out.ndim)
        return out if self.bias is None else out + _along_last_axis(self.bias[...], out.ndim)


class LinearStack(nnx.Module):
    """`E` linear maps of one size: `x @ kernel[e] * scale[e]`.

    `kernel` `[E, in, out]` is indexed by its first axis, so it is stored in `Platform.row_dtype`. `scale` is float32
    `[E, out]`, or `None`.
    """

    def __init__(
        self,
        count: int,
        in_features: int,
        out_features: int,
        *,
        scale: bool = False,
        dtype: DTypeLike,
        platform: Platform,
        rngs: nnx.Rngs,
    ) -> None:
        self.platform = platform
        values = initial_values((count, in_features, out_features), dtype, rngs)
        self.kernel = nnx.Param(encode_rows(values, platform.row_dtype(dtype)))
        self.scale = nnx.Param(jnp.ones((count, out_features), jnp.float32)) if scale else None

    def picked(self, x: Float[Array, "P in"], numbers: Int32[Array, "P"]) -> Float[Array, "P out"]:
        """Map `numbers[p]` of row `x[p]`, for every p; float32. Gathers one copy of a kernel for each row."""
        kernels = decode_rows(jnp.take(self.kernel[...], numbers, axis=0))
        out = _products(x[:, None], kernels)[:, 0]
        return out if self.scale is None else out * jnp.take(self.scale[...], numbers, axis=0)

    def each(self, x: Float[Array, "E T in"]) -> Float[Array, "E T out"]:
        """Map e of all rows `x[e]`, for every e; float32."""
        out = _products(x, decode_rows(self.kernel[...]))
        return out if self.scale is None else out * self.scale[...][:, None]

    def summed(self, x: Float[Array, "T E in"]) -> Float[Array, "T out"]:
        """The sum over e of map e of rows `x[:, e]`; float32."""
        if self.scale is not None:
            return jnp.sum(self.each(x.swapaxes(0, 1)), axis=0)
        joined = decode_rows(self.kernel[...]).reshape(-1, self.kernel.shape[-1])
        return input_major_product(x.reshape(x.shape[0], -1), joined, self.platform)


def _products(x: Float[Array, "P T in"], kernels: Float[Array, "P in out"]) -> Float[Array, "P T out"]:
    """`x[p] @ kernels[p]` for every p, multiplied in the dtype of the kernels, with a float32 result."""
    return jnp.matmul(x.astype(kernels.dtype), kernels, preferred_element_type=jnp.float32)


def _along_last_axis(values: Float[Array, "out"], num_axes: int) -> Float[Array, "*axes out"]:
    return jnp.expand_dims(values, tuple(range(num_axes - 1)))
