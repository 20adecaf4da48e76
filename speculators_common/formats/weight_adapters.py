"""Checkpoint tensors -> module parameters, strictly: every tensor is consumed, every parameter is filled, shapes are
checked first.

A family describes its checkpoint as a table of `Recipe`s, one per module parameter. `check_tensors` walks the whole
table before it complains, so that one error lists every missing, unexpected, misshapen and mistyped tensor; nothing is
read before the names and shapes are known to be right.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from dspark_jax.speculators_common.errors import collected_error

_MODEL_PREFIX = "model."


@runtime_checkable
class TensorSource(Protocol):
    """One tensor of a checkpoint: its header is known, its bytes are read on demand."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    def read(self) -> np.ndarray: ...


def _only(tensors: Sequence[np.ndarray]) -> np.ndarray:
    return tensors[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one module parameter is made from checkpoint tensors.

    `tensors` maps each checkpoint name to the shape it must have there; `assemble` gets the arrays in that order. Only
    tables of ids are anything but floating point.
    """

    tensors: Mapping[str, tuple[int, ...]]
    assemble: Callable[[Sequence[np.ndarray]], np.ndarray] = _only
    is_floating: bool = True


def copied(name: str, shape: tuple[int, ...]) -> Recipe:
    """The tensor as it is stored."""
    return Recipe(tensors={name: shape})


def transposed(name: str, shape: tuple[int, int]) -> Recipe:
    """A Linear stored `[out, in]`, wanted `[in, out]`; `shape` is the stored one."""
    return Recipe(tensors={name: shape}, assemble=lambda t: np.asarray(t[0]).T)


def stacked_columns(shapes: Mapping[str, tuple[int, int]]) -> Recipe:
    """Several Linears of one input, stored `[out, in]`, as one kernel `[in, sum of outs]`."""
    return Recipe(tensors=dict(shapes), assemble=lambda t: joined_rows(t).T)


def joined_biases(shapes: Mapping[str, tuple[int]]) -> Recipe:
    """The biases that belong to `stacked_columns`."""
    return Recipe(tensors=dict(shapes), assemble=joined_rows)


def joined_rows(tensors: Sequence[np.ndarray]) -> np.ndarray:
    """Rows of one kernel, one below the other; float32 where their storage types differ, because float16 and bfloat16
    have no common one.
    """
    types = {tensor.dtype for tensor in tensors}
    return np.concatenate([tensor if len(types) == 1 else tensor.astype(np.float32) for tensor in tensors], axis=0)


def without_model_prefix(tensors: Mapping[str, TensorSource]) -> Mapping[str, TensorSource]:
    """`tensors` under the names that draft formats give them: some writers put `model.` before every name. Names of
    which only some have it stay.
    """
    if not all(name.startswith(_MODEL_PREFIX) for name in tensors):
        return tensors
    return {name.removeprefix(_MODEL_PREFIX): tensor for name, tensor in tensors.items()}


def check_tensors(
    recipes: Mapping[str, Recipe],
    available: Mapping[str, TensorSource],
    *,
    file: str,
    ignored: Iterable[str] = (),
) -> None:
    """Raise one `CheckpointError` that lists every missing, unexpected, misshapen and mistyped tensor.

    The error is about `file`, a checkpoint's directory or its only file; a tensor that has a `file` of its own, a
    shard, is named together with it. `ignored` are full names of tensors without use here; each of them may be present
    or absent. One that ends in `.*` stands for every name below it.
    """
    wanted = {name: shape for recipe in recipes.values() for name, shape in recipe.tensors.items()}
    skipped = set(ignored)
    skipped_folders = tuple(name.removesuffix("*") for name in skipped if name.endswith(".*"))
    missing = [
        f"tensor {name}: missing, expected shape {list(shape)}"
        for name, shape in wanted.items()
        if name not in available
    ]
    surplus = [
        name
        for name in available
        if name not in wanted and name not in skipped and not name.startswith(skipped_folders)
    ]
    unexpected = [f"{_label(name, available[name], file)}: unexpected" for name in surplus]
    misshapen = [
        f"{_label(name, available[name], file)}: found shape {list(available[name].shape)}, expected {list(shape)}"
        for name, shape in wanted.items()
        if name in available and tuple(available[name].shape) != tuple(shape)
    ]
    mistyped = [
        f"{_label(name, available[name], file)}: found dtype {available[name].dtype}, expected a floating-point one"
        for recipe in recipes.values()
        for name in recipe.tensors
        if recipe.is_floating and name in available and not available[name].dtype.startswith(("float", "bfloat"))
    ]
    faults = {
        "missing": missing,
        "unexpected": unexpected,
        "of another shape": misshapen,
        "of another dtype": mistyped,
    }
    if any(faults.values()):
        raise collected_error(file, faults)


def _label(name: str, tensor: TensorSource, file: str) -> str:
    """What a message calls a tensor: its shard and its name, the shard without the directory that the message begins
    with.
    """
    stored_in = getattr(tensor, "file", "") or file
    if stored_in == file:
        return f"tensor {name}"
    return f"{os.path.relpath(stored_in, file) if Path(file) in Path(stored_in).parents else stored_in}: tensor {name}"
