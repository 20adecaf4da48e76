"""Load a module: build it abstractly, then fill it from a checkpoint. No memory is spent on initial values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import jax
import numpy as np
from flax import nnx

from dspark_jax.architectures.parameters import KeyPath, flat_parameters, stored_values
from dspark_jax.speculators_common.errors import DSparkError
from dspark_jax.speculators_common.formats.recipes import Recipe, TensorSource, check_ids, check_tensors

Module = TypeVar("Module", bound=nnx.Module)


def load_module(
    build: Callable[[], Module],
    recipes: Mapping[str, Recipe],
    tensors: Mapping[str, TensorSource],
    *,
    file: str,
    ignored: tuple[str, ...] = (),
) -> Module:
    """The module that `build` constructs, with the parameters of a checkpoint; see `fill_module`."""
    return fill_module(nnx.eval_shape(build), recipes, tensors, file=file, ignored=ignored)


def fill_module(
    module: Module,
    recipes: Mapping[str, Recipe],
    tensors: Mapping[str, TensorSource],
    *,
    file: str,
    ignored: tuple[str, ...] = (),
) -> Module:
    """A copy of the abstract `module` (from `nnx.eval_shape`) with the parameters of a checkpoint.

    `recipes` says how each parameter is made from the checkpoint's `tensors`. Every tensor must be used, except those
    in `ignored`, and every parameter must have a recipe. Names, shapes and dtypes are checked before any tensor is
    read. `file` names the checkpoint in messages. The dtype of a parameter is that of the module.

    Parameters are read, converted and put on the device one by one. So the memory beyond the final arrays is at most
    two copies of the largest parameter. `module_tensors` is the inverse. Raises `DSparkError` for a checkpoint that
    does not fit.
    """
    graphdef, abstract = nnx.split(module)
    parameters = flat_parameters(abstract)
    used = {path: recipe for path, recipe in recipes.items() if path in parameters}
    unfilled = sorted(set(parameters) - set(used))
    if unfilled:
        raise DSparkError(f"{file}: parameters without a weight recipe: {', '.join(unfilled)}")
    check_tensors(recipes, tensors, file=file, ignored=ignored)
    # The module may have no parameter for tensors of ids that are checked nevertheless.
    check_ids({path: recipe for path, recipe in recipes.items() if path not in parameters}, tensors)
    loaded: dict[KeyPath, nnx.Variable] = {}
    sources: dict[str, np.ndarray] = {}
    for path, recipe in used.items():
        # A tied head comes directly after the embedding and has the same source tensor, which is not read twice.
        if list(sources) != list(recipe.tensors):
            sources.clear()  # free the memory before the next tensors are read
            sources.update((name, tensors[name].read()) for name in recipe.tensors)
        key, variable = parameters[path]
        host = stored_values(variable, recipe.assemble(list(sources.values())))
        loaded[key] = variable.replace(_on_device(host, variable.get_value(), file, path))
    return nnx.merge(graphdef, nnx.from_flat_state(loaded))


def _on_device(host: np.ndarray, wanted: jax.ShapeDtypeStruct, file: str, path: str) -> jax.Array:
    if tuple(host.shape) != tuple(wanted.shape):
        raise DSparkError(
            f"{file}: parameter {path}: assembled shape {list(host.shape)}, expected {list(wanted.shape)}"
        )
    # A transposed view is passed on as it is: the runtime transposes several times faster than numpy, and directly into
    # the final array. Waiting keeps the number of copies in flight at one.
    return jax.block_until_ready(jax.device_put(host))
