"""The parameters of a module by dotted path, as host arrays and with named axes, independent of their storage.

A platform may store a kernel as `[out, in]`, and bfloat16 rows as uint16 bit patterns
(`speculators_common/numerics/rows.py`). Weight recipes know kernels only as `[in, out]`, and rows only as values. This
file converts between the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.speculators_common.formats.recipes import Axes, Recipe
from dspark_jax.speculators_common.numerics.matmul import OutputMajorKernel

KeyPath = tuple[Any, ...]
"""The path of a parameter as Flax has it: attribute names, and indices of lists."""

_BITS = np.dtype(np.uint16)


def flat_parameters(module: Any) -> dict[str, tuple[KeyPath, nnx.Variable]]:
    """Dotted path -> (key path, variable) of every parameter, in the order of the module.

    `module` is an `nnx.Module` or its `nnx.State`. It is not annotated as such: the run-time checks of the tests refuse
    how Flax declares `State`.
    """
    state = nnx.state(module) if isinstance(module, nnx.Module) else module
    return {".".join(str(key) for key in path): (path, variable) for path, variable in nnx.to_flat_state(state)}


def stored_values(parameter: nnx.Variable, values: np.ndarray) -> np.ndarray:
    """`values` in the storage order and the dtype of `parameter`; kernels are given as `[in, out]`.

    Values are rounded to the dtype. The result is a view of `values` if no conversion is needed. Only the dtype and the
    type of `parameter` are used, so its value may be a shape.
    """
    dtype = parameter.get_value().dtype
    values = values.T if isinstance(parameter, OutputMajorKernel) else values
    # `copy=False` also keeps the memory order of the axes.
    converted = np.asarray(values).astype(jnp.bfloat16 if dtype == _BITS else dtype, copy=False)
    return converted.view(_BITS) if dtype == _BITS else converted


def parameter_values(parameter: nnx.Variable) -> np.ndarray:
    """The values of `parameter` on the host, kernels as `[in, out]`. The inverse of `stored_values`."""
    stored = np.asarray(parameter.get_value())
    values = stored.view(jnp.bfloat16) if stored.dtype == _BITS else stored
    return values.T if isinstance(parameter, OutputMajorKernel) else values


def parameter_axes(module: Any, recipes: Mapping[str, Recipe]) -> dict[str, Axes]:
    """Dotted path -> names of the stored axes of every parameter, in storage order."""
    return {
        path: recipes[path].axes[::-1] if isinstance(variable, OutputMajorKernel) else recipes[path].axes
        for path, (_, variable) in flat_parameters(module).items()
    }
