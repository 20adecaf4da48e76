"""Kernels of linear maps: how they are stored, and the product with one.

A kernel means `[in, out]` values. Whether the array is that or its transpose is the platform's choice; the class of the
parameter says which.
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
    """A kernel that is stored `[out, in]`, as checkpoints have it. A plain parameter is stored `[in, out]`."""


def kernel_parameter(values: Float[Array, "in out"], platform: Platform) -> nnx.Param:
    """The parameter of a linear map, in the orientation that the platform multiplies fastest."""
    if _prefers_output_major(values.shape[0], values.shape[1], values.dtype, platform):
        return OutputMajorKernel(values.T)
    return nnx.Param(values)


def kernel_values(parameter: nnx.Param) -> Shaped[Array, "..."]:
    """A kernel as `[in, out]`, however it is stored; any other parameter as it is."""
    return parameter[...].T if isinstance(parameter, OutputMajorKernel) else parameter[...]


def set_kernel_values(parameter: nnx.Param, values: Shaped[Array, "..."]) -> None:
    """The inverse of `kernel_values`: give a parameter other values of the same shape and dtype."""
    parameter[...] = values.T if isinstance(parameter, OutputMajorKernel) else values


def kernel_product(x: Float[Array, "*axes in"], kernel: nnx.Param, platform: Platform) -> Float[Array, "*axes out"]:
    """`x @ kernel_values(kernel)` in the dtype of the kernel, with a float32 result."""
    if isinstance(kernel, OutputMajorKernel):
        return output_major_product(x, kernel[...], platform)
    return input_major_product(x, kernel[...], platform)


def input_major_product(
    x: Float[Array, "*axes in"], values: Float[Array, "in out"], platform: Platform
) -> Float[Array, "*axes out"]:
    """`x @ values` in the dtype of `values`, with a float32 result."""
    rows = x.astype(values.dtype)
    if np.prod(x.shape[:-1]) != 1:
        return jnp.matmul(rows, values, preferred_element_type=jnp.float32)
    padded = _without_lone_row(rows.reshape(1, -1), platform)
    product = jnp.matmul(padded, values, preferred_element_type=jnp.float32)[:1]
    return product.reshape(*x.shape[:-1], values.shape[1])


def output_major_product(
    x: Float[Array, "*axes in"], values: Float[Array, "out in"], platform: Platform
) -> Float[Array, "*axes out"]:
    """`x @ values.T` in the dtype of `values`, with a float32 result."""
    # With more axes XLA:CPU first copies a kernel of many outputs into the other orientation.
    rows = x.astype(values.dtype).reshape(-1, x.shape[-1])
    product = jax.lax.dot_general(
        _without_lone_row(rows, platform), values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return product[: rows.shape[0]].reshape(*x.shape[:-1], values.shape[0])


def _without_lone_row(rows: Float[Array, "n in"], platform: Platform) -> Float[Array, "m in"]:
    """The rows; twice the only one where that is faster (`Platform.pads_lone_bfloat16_row`)."""
    if rows.shape[0] == 1 and rows.dtype == jnp.bfloat16 and platform.pads_lone_bfloat16_row:
        return jnp.broadcast_to(rows, (2, rows.shape[1]))
    return rows


def _prefers_output_major(in_features: int, out_features: int, dtype: DTypeLike, platform: Platform) -> bool:
    """Which orientation streams faster for a few rows; `benchmarks/linear.py` measures it.

    On XLA:CPU the two-row bfloat16 product gains a seventh from reading along the inputs unless these are few (the rank
    of a small Markov head) or more than the outputs; the one-row float32 loop gains half as much again when they are
    more. Other platforms lay operands out as they like.
    """
    if not platform.kernels_by_size:
        return False
    return _FEW_INPUTS <= in_features <= out_features if dtype == jnp.bfloat16 else in_features > out_features
