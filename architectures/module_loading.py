"""Build a module abstractly and fill it from host arrays: no parameter is ever initialised and then thrown away."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.speculators_common.errors import DSparkError
from dspark_jax.speculators_common.weight_adapters import Recipe, TensorSource, check_tensors

Module = TypeVar("Module", bound=nnx.Module)


def load_module(
    build: Callable[[], Module], recipes: Mapping[str, Recipe], tensors: Mapping[str, TensorSource], *, file: str, ignored: tuple[str, ...] = ()
) -> Module:
    """The module that `build` makes, filled with the checkpoint's tensors.

    Every tensor must be consumed and every parameter filled; names and shapes are checked before a byte of them is read. A parameter stored as
    uint16 bit patterns gets the bits of the bfloat16 rounding (`speculators_common/storage.py`).
    """
    graphdef, abstract = nnx.split(nnx.eval_shape(build))
    flat = dict(nnx.to_flat_state(abstract))
    wanted = {".".join(str(key) for key in path): path for path in flat}
    used = {path: recipe for path, recipe in recipes.items() if path in wanted}
    unfilled = sorted(set(wanted) - set(used))
    if unfilled:
        raise DSparkError(f"{file}: parameters without a weight recipe: {', '.join(unfilled)}")
    check_tensors(recipes, tensors, file=file, ignored=ignored)
    for path, recipe in recipes.items():
        if path not in wanted and not recipe.is_floating:
            _assembled(recipe, tensors)  # a table of ids that leaves no parameter is checked all the same
    loaded = {}
    for path, recipe in used.items():
        variable = flat[wanted[path]]
        host = _assembled(recipe, tensors)
        loaded[wanted[path]] = variable.replace(_on_device(host, variable.get_value(), file, path))
    return nnx.merge(graphdef, nnx.from_flat_state(loaded))


def _assembled(recipe: Recipe, tensors: Mapping[str, TensorSource]) -> np.ndarray:
    return recipe.assemble([tensors[name].read() for name in recipe.tensors])


def _on_device(host: np.ndarray, wanted: jax.ShapeDtypeStruct, file: str, path: str) -> jax.Array:
    if tuple(host.shape) != tuple(wanted.shape):
        raise DSparkError(f"{file}: parameter {path}: assembled shape {list(host.shape)}, expected {list(wanted.shape)}")
    if wanted.dtype == np.uint16:
        return jnp.asarray(np.ascontiguousarray(host.astype(jnp.bfloat16)).view(np.uint16))
    return jnp.asarray(np.ascontiguousarray(host, dtype=wanted.dtype))
