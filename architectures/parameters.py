"""The parameters of a module as flat names, host arrays and named axes, however the platform has them stored.

A kernel may lie `[out, in]` and rows may be uint16 bit patterns of bfloat16 values
(`speculators_common/numerics/rows.py`); recipes speak of kernels `[in, out]` and of values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.speculators_common.formats.recipes import Axes, Recipe
from dspark_jax.speculators_common.numerics.matmul import OutputMajorKernel

_BITS = np.dtype(np.uint16)


def flat_parameters(module: Any) -> dict[str, tuple[tuple[Any, ...], nnx.Variable]]:
    """Dotted path -> key path and variable, of a module or of a state, in the module's order."""
    state = nnx.state(module) if isinstance(module, nnx.Module) else module
    return {".".join(str(key) for key in path): (path, variable) for path, variable in nnx.to_flat_state(state)}


def stored_values(parameter: nnx.Variable, values: np.ndarray) -> np.ndarray:
    """What `parameter` holds for these values, kernels being `[in, out]`: rounded to its dtype, and a view where that
    changes nothing. Only the dtype of `parameter` is looked at, so it may be abstract.
    """
    dtype = parameter.get_value().dtype
    values = values.T if isinstance(parameter, OutputMajorKernel) else values
    # `copy=False` keeps the order of the axes in memory, too.
    converted = np.asarray(values).astype(jnp.bfloat16 if dtype == _BITS else dtype, copy=False)
    return converted.view(_BITS) if dtype == _BITS else converted


def parameter_values(parameter: nnx.Variable) -> np.ndarray:
    """The values that `parameter` holds, on the host, kernels as `[in, out]`; the inverse of `stored_values`."""
    stored = np.asarray(parameter.get_value())
    values = stored.view(jnp.bfloat16) if stored.dtype == _BITS else stored
    return values.T if isinstance(parameter, OutputMajorKernel) else values


def parameter_axes(module: Any, recipes: Mapping[str, Recipe]) -> dict[str, Axes]:
    """Dotted path -> axis names of every parameter, in the order in which the module has the axes stored."""
    return {
        path: recipes[path].axes[::-1] if isinstance(variable, OutputMajorKernel) else recipes[path].axes
        for path, (_, variable) in flat_parameters(module).items()
    }
