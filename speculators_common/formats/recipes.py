"""Weight recipes: how checkpoint tensors become module parameters, and the inverse.

A family describes its checkpoint by one `Recipe` per module parameter. Loading is strict: every tensor is used, every
parameter is filled, and names and shapes are checked before any tensor is read. `check_tensors` reports all missing,
unexpected, misshapen and mistyped tensors in one error.
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
    """One tensor of a checkpoint: shape and dtype are known from the header, the values are read on demand."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str:
        """The numpy name of the dtype, for example `bfloat16`."""
        ...

    def read(self) -> np.ndarray:
        """The values, as stored."""
        ...


Assemble = Callable[[Sequence[np.ndarray]], np.ndarray]
Disassemble = Callable[[np.ndarray], Sequence[np.ndarray]]

# The logical name of a parameter axis. Sharding rules map these names to mesh axes. `None` is an axis that is never
# split. The parts of a fused axis lie one after the other; the axis has the name of the first part. For example, the
# outputs of `q`, `k` and `v` in one kernel are `heads`.
AxisName = Literal["hidden", "heads", "kv_heads", "mlp", "vocab", "draft_vocab", "experts", "rank", "taps", "per_layer"]
Axes = tuple[AxisName | None, ...]
AXIS_NAMES: frozenset[str] = frozenset(get_args(AxisName))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one module parameter is assembled from checkpoint tensors, and how it is split into them again.

    `disassemble` is the exact inverse of `assemble`, except where `assemble` drops padding: see `transposed`.
    """

    tensors: Mapping[str, tuple[int, ...]]  # name in the checkpoint -> shape in the checkpoint
    axes: Axes  # logical axes of the parameter; kernels are [in, out]
    assemble: Assemble  # arrays in the order of `tensors` -> parameter
    disassemble: Disassemble  # parameter -> arrays in the order of `tensors`
    is_floating: bool = True  # False: a table of token ids
    implied: np.ndarray | None = None  # value to write if the module does not hold the parameter


def copied(name: str, shape: tuple[int, ...], *, axes: Axes) -> Recipe:
    """A parameter that equals one tensor of `shape`, for example a norm weight or an embedding."""
    return Recipe(
        tensors={name: shape},
        axes=axes,
        assemble=lambda tensors: tensors[0].reshape(shape),
        disassemble=lambda values: [values.reshape(shape)],
    )


def transposed(name: str, shape: tuple[int, int], *, axes: Axes, rows: int | None = None) -> Recipe:
    """A Linear kernel `[in, out]`, stored as one tensor `[out, in]`. `shape` is that of the tensor.

    `rows` is for a head that is padded beyond the vocabulary: the parameter has the first `rows` outputs only. The
    other outputs are dropped on load and written as zeros.
    """
    num_rows = shape[0] if rows is None else rows

    def disassemble(values: np.ndarray) -> Sequence[np.ndarray]:
        return [np.pad(values.T, ((0, shape[0] - num_rows), (0, 0))) if num_rows < shape[0] else values.T]

    return Recipe(
        tensors={name: shape}, axes=axes, assemble=lambda tensors: tensors[0][:num_rows].T, disassemble=disassemble
    )


def stacked_columns(shapes: Mapping[str, tuple[int, int]], *, axes: Axes) -> Recipe:
    """Several Linears with the same input, each stored as `[out, in]`, as one kernel `[in, sum of outs]`."""
    return Recipe(
        tensors=dict(shapes),
        axes=axes,
        assemble=lambda tensors: joined_rows(tensors).T,
        disassemble=lambda values: split_rows(values.T, shapes.values()),
    )


def joined_biases(shapes: Mapping[str, tuple[int]], *, axes: Axes) -> Recipe:
    """The biases `[out]` of the Linears of `stacked_columns`, as one bias `[sum of outs]`."""
    return Recipe(
        tensors=dict(shapes),
        axes=axes,
        assemble=joined_rows,
        disassemble=lambda values: split_rows(values, shapes.values()),
    )


def stacked_experts(shapes: Mapping[str, tuple[int, int]], num_experts: int, *, axes: Axes) -> Recipe:
    """Linears of E experts, each stored as `[out, in]`, as one kernel `[E, in, sum of outs of an expert]`.

    `shapes` lists all Linears of the first expert, then those of the second, and so on.
    """

    def assemble(tensors: Sequence[np.ndarray]) -> np.ndarray:
        # The concatenation is the only copy; reshaping and swapping axes give views.
        rows = joined_rows(tensors)
        return rows.reshape(num_experts, -1, rows.shape[1]).swapaxes(1, 2)

    def disassemble(values: np.ndarray) -> Sequence[np.ndarray]:
        return split_rows(values.swapaxes(1, 2).reshape(-1, values.shape[1]), shapes.values())

    return Recipe(tensors=dict(shapes), axes=axes, assemble=assemble, disassemble=disassemble)


def fused_experts(name: str, shape: tuple[int, int, int], *, axes: Axes) -> Recipe:
    """One Linear of each of E experts, stored in one tensor `[E, out, in]`, as one kernel `[E, in, out]`."""
    return Recipe(
        tensors={name: shape},
        axes=axes,
        assemble=lambda tensors: tensors[0].swapaxes(1, 2),
        disassemble=lambda values: [values.swapaxes(1, 2)],
    )


def constant(value: np.ndarray, *, axes: Axes) -> Recipe:
    """A parameter with the fixed `value`, for which the checkpoint has no tensor.

    `disassemble` returns no array. It raises `DSparkError` for any other value, because that value would be lost.
    """

    def disassemble(values: np.ndarray) -> Sequence[np.ndarray]:
        if not np.array_equal(values, value):
            raise DSparkError(
                f"found {shown(values.tolist())}, allowed {shown(value.tolist())}: the file has no tensor for it"
            )
        return []

    return Recipe(tensors={}, axes=axes, assemble=lambda tensors: value, disassemble=disassemble)


def joined_rows(tensors: Sequence[np.ndarray]) -> np.ndarray:
    """The tensors concatenated along axis 0. If their dtypes differ, the result is float32.

    float16 and bfloat16 have no common dtype in NumPy; float32 holds both exactly.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    return np.concatenate([tensor if len(dtypes) == 1 else tensor.astype(np.float32) for tensor in tensors], axis=0)


def split_rows(rows: np.ndarray, shapes: Iterable[tuple[int, ...]]) -> list[np.ndarray]:
    """The inverse of `joined_rows` for tensors of these `shapes`. The dtype stays that of `rows`."""
    ends = np.cumsum([shape[0] for shape in shapes])
    return np.split(rows, ends[:-1])


def without_model_prefix(tensors: Mapping[str, TensorSource]) -> Mapping[str, TensorSource]:
    """`tensors` without the prefix `model.` that some writers of drafts put before every name.

    If only some names have the prefix, all names stay as they are.
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
    """Check that the `available` tensors are exactly those of the `recipes`, with the right shapes and dtypes.

    `file` is the directory of the checkpoint or its only file. `ignored` are names of tensors that are not used and may
    be present or absent; a name that ends in `.*` stands for all names with that prefix. Raises one `CheckpointError`
    about `file` that names the missing, unexpected, misshapen and mistyped tensors, each with its shard.
    """
    wanted = {name: shape for recipe in recipes.values() for name, shape in recipe.tensors.items()}
    skipped = set(ignored)
    skipped_folders = tuple(name.removesuffix("*") for name in skipped if name.endswith(".*"))
    missing = [
        f"tensor {name}: missing, expected shape {list(shape)}"
        for name, shape in wanted.items()
        if name not in available
    ]
    unexpected_names = [
        name
        for name in available
        if name not in wanted and name not in skipped and not name.startswith(skipped_folders)
    ]
    unexpected = [f"{_label(name, available[name], file)}: unexpected" for name in unexpected_names]
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


def check_ids(recipes: Mapping[str, Recipe], available: Mapping[str, TensorSource]) -> None:
    """Assemble the tables of token ids among `recipes`, and drop them: assembling checks the ids.

    Only these tensors are read; they are small. The tensors must have passed `check_tensors`. Raises `CheckpointError`.
    """
    for recipe in recipes.values():
        if not recipe.is_floating:
            recipe.assemble([available[name].read() for name in recipe.tensors])


def _label(name: str, tensor: TensorSource, file: str) -> str:
    """The tensor in a message: its shard, relative to `file`, and its name. Without shards, the name alone."""
    stored_in = getattr(tensor, "file", "") or file
    if stored_in == file:
        return f"tensor {name}"
    return f"{os.path.relpath(stored_in, file) if Path(file) in Path(stored_in).parents else stored_in}: tensor {name}"
