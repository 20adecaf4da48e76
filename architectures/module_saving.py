"""Save modules: parameters -> checkpoint tensors by the weight recipes, and drafts -> directories."""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from dspark_jax.architectures.drafting.draft_chain import DraftChain
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
    module: nnx.Module,
    recipes: Mapping[str, Recipe],
    dtypes: Mapping[str, str] | None = None,
    *,
    left_out: Collection[str] = (),
) -> dict[str, np.ndarray]:
    """The checkpoint tensors of `module`, by name. `load_module` with the same recipes is the inverse.

    `dtypes` maps tensor names to the numpy name of the dtype to write. A tensor without an entry gets the dtype of its
    parameter; tensors of ids get the dtype of the format. Values are rounded if the written dtype is narrower. So a
    loaded tensor comes back bit for bit if it is written in the dtype that it was stored in and the module's dtype is
    not narrower than that. Tensors named in `left_out` are not written.

    Raises `DSparkError` if a parameter has no recipe, if the format cannot hold the values of a parameter, if two
    parameters with different values share one tensor, or if no parameter holds a tensor.
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
            continue  # the module has no such parameter: a tied head uses the array of the embedding
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
    draft: DraftChain,
    directory: Path | str,
    *,
    stored: Mapping[str, TensorSource] | None = None,
    dtype: DTypeLike | None = None,
) -> Path:
    """Write `draft`, of any family, to `directory` in the format of its family, and return the directory.

    The directory appears complete or not at all. An existing directory is replaced if it holds only such files.

    `stored` are the tensors of the checkpoint that the draft was loaded from. If given, the same tensors are written in
    the same dtypes, bit for bit as they were loaded if the dtype of the draft is not narrower. Without `stored` every
    tensor of the format is written in the dtype of its parameter. `dtype` replaces the dtype of all floating-point
    tensors. An embedding or head that the draft takes from its target is not written.

    Raises `CheckpointError` if the format cannot express the config, `DSparkError` if the format has no writer.
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
    """The dtype that the config states: that of most floating-point elements, as a numpy name."""
    counts: collections.Counter[str] = collections.Counter()
    for tensor in tensors.values():
        if "float" in tensor.dtype.name:
            counts[tensor.dtype.name] += tensor.size
    return counts.most_common(1)[0][0]
