"""Kernels of linear maps: their storage order, and the product with a kernel.

A kernel has the values `[in, out]`. The platform decides whether the array is stored like that or transposed. The class
of the parameter says which of the two it is.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from dspark_jax.speculators_common.numerics.platform import Platform

_FEW_INPUTS = 128


class OutputMajorKernel(nnx.Param):
    """A kernel stored as `[out, in]`, as in checkpoints. A kernel of the class `nnx.Param` is stored as `[in, out]`."""


def kernel_parameter(values: Float[Array, "in out"], platform: Platform) -> nnx.Param:
    """A new parameter for the kernel `values`, in the order that the platform multiplies fastest."""
    if _prefers_output_major(values.shape[0], values.shape[1], values.dtype, platform):
        return OutputMajorKernel(values.T)
    return nnx.Param(values)


def kernel_values(parameter: nnx.Param) -> Shaped[Array, "..."]:
    """The values of a kernel as `[in, out]`, whatever its storage order; any other parameter unchanged."""
    return parameter[...].T if isinstance(parameter, OutputMajorKernel) else parameter[...]


def set_kernel_values(parameter: nnx.Param, values: Shaped[Array, "..."]) -> None:
    """The inverse of `kernel_values`: set new values of the same shape and dtype."""
    parameter[...] = values.T if isinstance(parameter, OutputMajorKernel) else values


def kernel_product(x: Float[Array, "*axes in"], kernel: nnx.Param, platform: Platform) -> Float[Array, "*axes out"]:
    """`x @ kernel_values(kernel)`, multiplied in the dtype of the kernel, with a float32 result."""
    if isinstance(kernel, OutputMajorKernel):
        return output_major_product(x, kernel[...], platform)
    return input_major_product(x, kernel[...], platform)


def input_major_product(
    x: Float[Array, "*axes in"], values: Float[Array, "in out"], platform: Platform
) -> Float[Array, "*axes out"]:
    """`x @ values`, multiplied in the dtype of `values`, with a float32 result."""
    rows = x.astype(values.dtype)
    if np.prod(x.shape[:-1]) != 1:
        return jnp.matmul(rows, values, preferred_element_type=jnp.float32)
    padded = _without_lone_row(rows.reshape(1, -1), platform)
    product = jnp.matmul(padded, values, preferred_element_type=jnp.float32)[:1]
    return product.reshape(*x.shape[:-1], values.shape[1])


def output_major_product(
    x: Float[Array, "*axes in"], values: Float[Array, "out in"], platform: Platform
) -> Float[Array, "*axes out"]:
    """`x @ values.T`, multiplied in the dtype of `values`, with a float32 result."""
    # Two axes only: with more, XLA:CPU first transposes a kernel of many outputs.
    rows = x.astype(values.dtype).reshape(-1, x.shape[-1])
    product = jax.lax.dot_general(
        _without_lone_row(rows, platform), values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return product[: rows.shape[0]].reshape(*x.shape[:-1], values.shape[0])


def _without_lone_row(rows: Float[Array, "n in"], platform: Platform) -> Float[Array, "m in"]:
    """`rows`, with a single row doubled where that is faster (`Platform.pads_lone_bfloat16_row`)."""
    if rows.shape[0] == 1 and rows.dtype == jnp.bfloat16 and platform.pads_lone_bfloat16_row:
        return jnp.broadcast_to(rows, (2, rows.shape[1]))
    return rows


def _prefers_output_major(in_features: int, out_features: int, dtype: DTypeLike, platform: Platform) -> bool:
    """Whether `[out, in]` is the faster order for a product of a few rows; measured by `benchmarks/linear.py`.

    On XLA:CPU a bfloat16 product of two rows is a seventh faster with `[out, in]`, unless the inputs are few (the rank
    of a small Markov head) or more than the outputs. A float32 product of one row is 1.5 times as fast with `[out, in]`
    if the inputs are more than the outputs. Other platforms choose the layout of operands themselves.
    """
    if not platform.kernels_by_size:
        return False
    return _FEW_INPUTS <= in_features <= out_features if dtype == jnp.bfloat16 else in_features > out_features
