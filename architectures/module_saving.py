"""Modules back to checkpoint tensors, by the recipes that they were made with, and drafts back to directories."""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from dspark_jax.architectures.drafting.tables import borrowed_tensors, optional_tensors
from dspark_jax.architectures.parameters import flat_parameters, parameter_values
from dspark_jax.architectures.registry import retrieve
from dspark_jax.speculators_common.errors import DSparkError
from dspark_jax.speculators_common.files.atomic_directory import replaced_directory
from dspark_jax.speculators_common.files.json_file import write_json_object
from dspark_jax.speculators_common.files.safetensors_file import numpy_dtype, write_safetensors
from dspark_jax.speculators_common.formats.recipes import Recipe, TensorSource

WEIGHTS = "model.safetensors"


def module_tensors(
    module: Any,
    recipes: Mapping[str, Recipe],
    dtypes: Mapping[str, str] | None = None,
    *,
    left_out: Collection[str] = (),
) -> dict[str, np.ndarray]:
    """Every checkpoint tensor of `module`, by name; `load_module` with the same recipes makes an equal module of them.

    `dtypes` are the numpy names of the dtypes to write, by tensor; a tensor without one gets the dtype that the module
    holds it in, and ids get that of the format. Values are rounded where a dtype is narrower. So the tensors of a
    loaded module equal the loaded ones bit for bit if they are written in the dtypes that they were stored in and the
    module is at least as wide. Tensors named in `left_out` are not written. Raises `DSparkError` for two parameters
    that differ where the file has one tensor for both, and for a parameter that the file cannot hold.
    """
    parameters = flat_parameters(module)
    unwritten = sorted(parameters.keys() - recipes.keys())
    if unwritten:
        raise DSparkError(f"parameters without a weight recipe: {', '.join(unwritten)}")
    tensors: dict[str, np.ndarray] = {}
    written = {path: recipe for path, recipe in recipes.items() if not recipe.tensors.keys() & set(left_out)}
    for path, recipe in written.items():
        if path in parameters:
            values = parameter_values(parameters[path][1])
        elif recipe.implied is not None:
            values = recipe.implied
        else:
            continue  # the parameter shares the tensor of another one, as a tied head may
        try:
            parts = recipe.disassemble(values)
        except DSparkError as error:
            raise DSparkError(f"parameter {path}: {error}") from error
        for (name, shape), part in zip(recipe.tensors.items(), parts, strict=True):
            dtype = part.dtype if dtypes is None or name not in dtypes else numpy_dtype(dtypes[name])
            tensor = np.ascontiguousarray(part.astype(dtype, copy=False)).reshape(shape)
            if name in tensors and tensors[name].tobytes() != tensor.tobytes():
                raise DSparkError(
                    f"parameter {path}: found other values, allowed those of tensor {name}: they share it"
                )
            tensors.setdefault(name, tensor)
    missing = [name for recipe in written.values() for name in recipe.tensors if name not in tensors]
    if missing:
        raise DSparkError(f"no parameter holds tensor {', '.join(missing)}")
    return tensors


def save_draft(
    draft: Any,
    directory: Path | str,
    *,
    stored: Mapping[str, TensorSource] | None = None,
    dtype: DTypeLike | None = None,
) -> Path:
    """Write `draft`, a module of any family, in the format of its family, whole or not at all; returns the directory.

    `stored` are the tensors of the checkpoint that it was loaded from, if any: the same ones are written, in the same
    dtypes, so that a loaded draft of at least that width comes back bit for bit. Without them every tensor of the
    format is written in the dtype that the module has it in. `dtype` overrules both for floating-point tensors. Tables
    that the draft borrows from its target are not written. A directory that holds nothing but such files is replaced.
    Raises `CheckpointError` for what the format has no words for, `DSparkError` for a format without a writer.
    """
    config = draft.config
    entry = retrieve(config.architecture)
    if entry.write_config is None:
        raise DSparkError(f"{config.architecture}: drafts of the family {entry.family} cannot be written")
    names = optional_tensors(config, draft.tables) if stored is None else stored.keys()
    recipes = entry.recipes(config, names)
    dtypes = {} if stored is None else {name: tensor.dtype for name, tensor in stored.items()}
    if dtype is not None:
        floating = [name for recipe in recipes.values() if recipe.is_floating for name in recipe.tensors]
        dtypes |= dict.fromkeys(floating, np.dtype(dtype).name)
    tensors = module_tensors(draft, recipes, dtypes, left_out=borrowed_tensors(draft.tables))
    files = entry.write_config(config, dtype=_main_dtype(tensors))
    with replaced_directory(directory, replaceable=(*files, WEIGHTS)) as fresh:
        write_safetensors(fresh / WEIGHTS, tensors)
        for name, content in files.items():
            write_json_object(fresh / name, content)
    return Path(directory)


def _main_dtype(tensors: Mapping[str, np.ndarray]) -> str:
    """The dtype that a config states: the floating-point one that most elements have."""
    counts: collections.Counter[str] = collections.Counter()
    for tensor in tensors.values():
        if "float" in tensor.dtype.name:
            counts[tensor.dtype.name] += tensor.size
    return counts.most_common(1)[0][0]
