"""Checkpoint tensors <-> module parameters, strictly: every tensor is consumed, every parameter is filled, shapes are
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
from typing import Literal, Protocol, get_args, runtime_checkable

import numpy as np

from dspark_jax.speculators_common.errors import DSparkError, collected_error, shown

_MODEL_PREFIX = "model."


@runtime_checkable
class TensorSource(Protocol):
    """One tensor of a checkpoint: its header is known, its bytes are read on demand."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    def read(self) -> np.ndarray: ...


Assemble = Callable[[Sequence[np.ndarray]], np.ndarray]
Disassemble = Callable[[np.ndarray], Sequence[np.ndarray]]

# What an axis of a parameter runs over. Sharding rules map these names to mesh axes; `None` is an axis that nothing
# splits. A fused axis (`q`, `k` and `v` in one kernel) has the name of its parts, which lie one after the other.
AxisName = Literal["hidden", "heads", "kv_heads", "mlp", "vocab", "draft_vocab", "experts", "rank", "taps", "per_layer"]
Axes = tuple[AxisName | None, ...]
AXIS_NAMES: frozenset[str] = frozenset(get_args(AxisName))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one module parameter is made from checkpoint tensors, and how they are made from it.

    `tensors` maps each checkpoint name to the shape it must have there. `assemble` gets the arrays in that order;
    `disassemble` gets the parameter's values and gives them back in that order. The pair keeps every bit, but for
    what the module does not keep: see `transposed`. `axes` names the axes of the assembled parameter, kernels being
    `[in, out]`. Only tables of ids are anything but floating point. `implied` is the value of a parameter that the
    module has no need to hold.
    """

    tensors: Mapping[str, tuple[int, ...]]
    axes: Axes
    assemble: Assemble
    disassemble: Disassemble
    is_floating: bool = True
    implied: np.ndarray | None = None


def copied(name: str, shape: tuple[int, ...], *, axes: Axes) -> Recipe:
    """The tensor as it is stored."""
    return Recipe(
        tensors={name: shape},
        axes=axes,
        assemble=lambda tensors: tensors[0].reshape(shape),
        disassemble=lambda values: [values.reshape(shape)],
    )


def transposed(name: str, shape: tuple[int, int], *, axes: Axes, rows: int | None = None) -> Recipe:
    """A Linear stored `[out, in]`, wanted `[in, out]`; `shape` is the stored one, `axes` those of the parameter.

    With `rows` the module has the first so many outputs only, of a head that is padded beyond the vocabulary. The rows
    beyond it are gone with that: they are written as zeros.
    """
    kept = shape[0] if rows is None else rows

    def disassemble(values: np.ndarray) -> Sequence[np.ndarray]:
        return [np.pad(values.T, ((0, shape[0] - kept), (0, 0))) if kept < shape[0] else values.T]

    return Recipe(
        tensors={name: shape}, axes=axes, assemble=lambda tensors: tensors[0][:kept].T, disassemble=disassemble
    )


def stacked_columns(shapes: Mapping[str, tuple[int, int]], *, axes: Axes) -> Recipe:
    """Several Linears of one input, stored `[out, in]`, as one kernel `[in, sum of outs]`."""
    return Recipe(
        tensors=dict(shapes),
        axes=axes,
        assemble=lambda tensors: joined_rows(tensors).T,
        disassemble=lambda values: split_rows(values.T, shapes.values()),
    )


def joined_biases(shapes: Mapping[str, tuple[int]], *, axes: Axes) -> Recipe:
    """The biases that belong to `stacked_columns`."""
    return Recipe(
        tensors=dict(shapes),
        axes=axes,
        assemble=joined_rows,
        disassemble=lambda values: split_rows(values, shapes.values()),
    )


def stacked_experts(shapes: Mapping[str, tuple[int, int]], num_experts: int, *, axes: Axes) -> Recipe:
    """Linears `[out, in]`, expert by expert the same number of them, as one array `[E, in, sum of outs]`."""

    def assemble(tensors: Sequence[np.ndarray]) -> np.ndarray:
        # One copy: rows lie end to end as wanted, only the view is transposed.
        rows = joined_rows(tensors)
        return rows.reshape(num_experts, -1, rows.shape[1]).swapaxes(1, 2)

    def disassemble(values: np.ndarray) -> Sequence[np.ndarray]:
        return split_rows(values.swapaxes(1, 2).reshape(-1, values.shape[1]), shapes.values())

    return Recipe(tensors=dict(shapes), axes=axes, assemble=assemble, disassemble=disassemble)


def fused_experts(name: str, shape: tuple[int, int, int], *, axes: Axes) -> Recipe:
    """The Linears of all experts in one tensor `[E, out, in]`, as one array `[E, in, out]`."""
    return Recipe(
        tensors={name: shape},
        axes=axes,
        assemble=lambda tensors: tensors[0].swapaxes(1, 2),
        disassemble=lambda values: [values.swapaxes(1, 2)],
    )


def constant(value: np.ndarray, *, axes: Axes) -> Recipe:
    """A parameter that the file has no tensor for. Only this very value can be written: as no tensor."""

    def disassemble(values: np.ndarray) -> Sequence[np.ndarray]:
        if not np.array_equal(values, value):
            raise DSparkError(
                f"found {shown(values.tolist())}, allowed {shown(value.tolist())}: the file has no tensor for it"
            )
        return []

    return Recipe(tensors={}, axes=axes, assemble=lambda tensors: value, disassemble=disassemble)


def joined_rows(tensors: Sequence[np.ndarray]) -> np.ndarray:
    """Rows of one kernel, one below the other; float32 where their storage types differ, because float16 and bfloat16
    have no common one.
    """
    types = {tensor.dtype for tensor in tensors}
    return np.concatenate([tensor if len(types) == 1 else tensor.astype(np.float32) for tensor in tensors], axis=0)


def split_rows(rows: np.ndarray, shapes: Iterable[tuple[int, ...]]) -> list[np.ndarray]:
    """The inverse of `joined_rows`, for tensors of these shapes."""
    ends = np.cumsum([shape[0] for shape in shapes])
    return np.split(rows, ends[:-1])


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
