"""Matrix products with float32 accumulation, kept on the fast path of every platform."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from dspark_jax.speculators_common.numerics.storage import runs_on_cpu


class OutputMajorKernel(nnx.Param):
    """The kernel of a linear map, stored `[out, in]`: the transpose of a plain kernel parameter, and what checkpoints
    store.
    """


def kernel_parameter(values: Float[Array, "in out"]) -> nnx.Param:
    """The parameter of a linear map, in the orientation that the platform multiplies fastest."""
    return (
        OutputMajorKernel(values.T)
        if _prefers_output_major(values.shape[0], values.shape[1], values.dtype)
        else nnx.Param(values)
    )


def kernel_values(parameter: nnx.Param) -> Shaped[Array, "..."]:
    """A kernel as `[in, out]`, however it is stored; any other parameter as it is."""
    return parameter[...].T if isinstance(parameter, OutputMajorKernel) else parameter[...]


def linear(x: Float[Array, "*axes in"], kernel: nnx.Param) -> Float[Array, "*axes out"]:
    """`x @ kernel_values(kernel)` in the dtype of the kernel, with a float32 result."""
    if not isinstance(kernel, OutputMajorKernel):
        return matmul(x, kernel[...])
    values = kernel[...]
    rows = x.astype(values.dtype).reshape(
        -1, x.shape[-1]
    )  # with more axes XLA:CPU copies a wide kernel into the other orientation first
    product = jax.lax.dot_general(
        _without_lone_row(rows), values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return product[: rows.shape[0]].reshape(*x.shape[:-1], values.shape[0])


def matmul(x: Float[Array, "*axes in"], kernel: Float[Array, "in out"]) -> Float[Array, "*axes out"]:
    """`x @ kernel` in the dtype of the kernel, with a float32 result."""
    rows = x.astype(kernel.dtype)
    if np.prod(x.shape[:-1]) != 1:
        return jnp.matmul(rows, kernel, preferred_element_type=jnp.float32)
    product = jnp.matmul(_without_lone_row(rows.reshape(1, -1)), kernel, preferred_element_type=jnp.float32)[:1]
    return product.reshape(*x.shape[:-1], kernel.shape[1])


def _without_lone_row(rows: Float[Array, "n in"]) -> Float[Array, "m in"]:
    """The rows, or twice the only one.

    XLA:CPU has a fast bfloat16 product for two rows or more and a float32 result; a lone row becomes a scalar loop
    eight times slower, over a converted copy of the kernel.
    """
    if rows.shape[0] == 1 and rows.dtype == jnp.bfloat16 and runs_on_cpu():
        return jnp.broadcast_to(rows, (2, rows.shape[1]))
    return rows


def _prefers_output_major(in_features: int, out_features: int, dtype: DTypeLike) -> bool:
    """Which orientation streams faster for a few rows; `benchmarks/linear.py` measures it.

    On XLA:CPU the two-row bfloat16 kernel gains a seventh from reading along the inputs unless there are more inputs
    than outputs; the one-row float32 loop gains half as much again when there are. Other platforms lay operands out as
    they like.
    """
    if not runs_on_cpu():
        return False
    wide_input = in_features > out_features
    return not wide_input if dtype == jnp.bfloat16 else wide_input
