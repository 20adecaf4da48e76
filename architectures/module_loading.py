"""Build a module abstractly and fill it from host arrays: no parameter is ever initialised and then thrown away."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import jax
import numpy as np
from flax import nnx

from dspark_jax.architectures.parameters import flat_parameters, stored_values
from dspark_jax.speculators_common.errors import DSparkError
from dspark_jax.speculators_common.formats.recipes import Recipe, TensorSource, check_tensors

Module = TypeVar("Module", bound=nnx.Module)


def load_module(
    build: Callable[[], Module],
    recipes: Mapping[str, Recipe],
    tensors: Mapping[str, TensorSource],
    *,
    file: str,
    ignored: tuple[str, ...] = (),
) -> Module:
    """The module that `build` makes, filled with the checkpoint's tensors; see `fill_module`."""
    return fill_module(nnx.eval_shape(build), recipes, tensors, file=file, ignored=ignored)


def fill_module(
    module: Module,
    recipes: Mapping[str, Recipe],
    tensors: Mapping[str, TensorSource],
    *,
    file: str,
    ignored: tuple[str, ...] = (),
) -> Module:
    """A copy of `module`, whose parameters are shapes (`nnx.eval_shape`), filled with the checkpoint's tensors.

    Every tensor must be consumed and every parameter filled; names and shapes are checked before a byte of them is
    read. Parameters are read, converted and put on the device one by one: beyond the final arrays no more than two
    copies of the largest one are alive at a time. `module_tensors` is the inverse.
    """
    graphdef, abstract = nnx.split(module)
    parameters = flat_parameters(abstract)
    used = {path: recipe for path, recipe in recipes.items() if path in parameters}
    unfilled = sorted(set(parameters) - set(used))
    if unfilled:
        raise DSparkError(f"{file}: parameters without a weight recipe: {', '.join(unfilled)}")
    check_tensors(recipes, tensors, file=file, ignored=ignored)
    for path, recipe in recipes.items():
        if path not in parameters and not recipe.is_floating:
            # Assembling checks the ids, also where the module has no parameter for them.
            recipe.assemble([tensors[name].read() for name in recipe.tensors])
    loaded = {}
    held: dict[str, np.ndarray] = {}
    for path, recipe in used.items():
        # A tied head is made from the tensor that was just read for the embedding: it is not read again.
        if list(held) != list(recipe.tensors):
            held.clear()  # free these before the next tensors are read
            held.update((name, tensors[name].read()) for name in recipe.tensors)
        key, variable = parameters[path]
        host = stored_values(variable, recipe.assemble(list(held.values())))
        loaded[key] = variable.replace(_on_device(host, variable.get_value(), file, path))
    return nnx.merge(graphdef, nnx.from_flat_state(loaded))


def _on_device(host: np.ndarray, wanted: jax.ShapeDtypeStruct, file: str, path: str) -> jax.Array:
    if tuple(host.shape) != tuple(wanted.shape):
        raise DSparkError(
            f"{file}: parameter {path}: assembled shape {list(host.shape)}, expected {list(wanted.shape)}"
        )
    # A transposed view goes in as it is: the runtime transposes several times faster than numpy, and into the final
    # array. Waiting keeps one copy in flight at a time.
    return jax.block_until_ready(jax.device_put(host))
