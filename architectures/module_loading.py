"""Build a module abstractly and fill it from host arrays: no parameter is ever initialised and then thrown away."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.speculators_common.errors import DSparkError
from dspark_jax.speculators_common.formats.weight_adapters import Recipe, TensorSource, check_tensors
from dspark_jax.speculators_common.numerics.matmul import OutputMajorKernel

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
    read. A parameter stored as uint16 bit patterns gets the bits of the bfloat16 rounding
    (`speculators_common/numerics/rows.py`). Parameters are read, converted and put on the device one by one: beyond
    the final arrays no more than two copies of the largest one are alive at a time.
    """
    graphdef, abstract = nnx.split(module)
    flat = dict(nnx.to_flat_state(abstract))
    wanted = {".".join(str(key) for key in path): path for path in flat}
    used = {path: recipe for path, recipe in recipes.items() if path in wanted}
    unfilled = sorted(set(wanted) - set(used))
    if unfilled:
        raise DSparkError(f"{file}: parameters without a weight recipe: {', '.join(unfilled)}")
    check_tensors(recipes, tensors, file=file, ignored=ignored)
    for path, recipe in recipes.items():
        if path not in wanted and not recipe.is_floating:
            recipe.assemble(
                [tensors[name].read() for name in recipe.tensors]
            )  # a table of ids that leaves no parameter is checked all the same
    loaded = {}
    held: dict[str, np.ndarray] = {}
    for path, recipe in used.items():
        if list(held) != list(
            recipe.tensors
        ):  # a tied head is made from the tensor that the embedding has just been made from
            held.clear()  # before the next ones are read: one parameter after the other
            held.update((name, tensors[name].read()) for name in recipe.tensors)
        variable = flat[wanted[path]]
        host = recipe.assemble(list(held.values()))
        if isinstance(variable, OutputMajorKernel):
            host = host.T
        loaded[wanted[path]] = variable.replace(_on_device(host, variable.get_value(), file, path))
    return nnx.merge(graphdef, nnx.from_flat_state(loaded))


def _on_device(host: np.ndarray, wanted: jax.ShapeDtypeStruct, file: str, path: str) -> jax.Array:
    if tuple(host.shape) != tuple(wanted.shape):
        raise DSparkError(
            f"{file}: parameter {path}: assembled shape {list(host.shape)}, expected {list(wanted.shape)}"
        )
    is_bits = wanted.dtype == np.uint16
    values = np.asarray(host).astype(
        jnp.bfloat16 if is_bits else wanted.dtype, copy=False
    )  # keeps the order of the axes in memory
    # A transposed view goes in as it is: the runtime transposes several times faster than numpy, and into the final
    # array. Waiting keeps one copy in flight at a time.
    return jax.block_until_ready(jax.device_put(values.view(np.uint16) if is_bits else values))
