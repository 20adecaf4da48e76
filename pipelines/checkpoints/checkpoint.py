"""Opens a checkpoint: a Hugging Face directory, a GGUF file or the demo model. Reads configs and headers only."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from dspark_jax.architectures.registry import CONFIG_FILE, implied_name, own_config_files
from dspark_jax.pipelines.checkpoint_data import Checkpoint
from dspark_jax.pipelines.checkpoints.gguf.checkpoint import find_smollm2, open_gguf
from dspark_jax.pipelines.checkpoints.hub import local_path
from dspark_jax.speculators_common.errors import CheckpointError, collected_error, field_error, missing_field
from dspark_jax.speculators_common.files.json_file import read_json_object
from dspark_jax.speculators_common.files.safetensors_file import SafetensorsTensor, open_safetensors
from dspark_jax.speculators_common.formats.quantised import refuse_quantised, refuse_quantised_directory
from dspark_jax.speculators_common.formats.recipes import without_model_prefix

__all__ = ["DEMO_TARGET", "Checkpoint", "open_checkpoint", "open_target", "with_draft_names"]

DEMO_TARGET = "smollm2"
_GENERATION_CONFIG = "generation_config.json"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})


def open_target(path_or_name: Path | str) -> Checkpoint:
    """Open a target: the name `smollm2` (the demo model), a .gguf file, or anything that `open_checkpoint` opens.

    A directory that has the name of the demo model can be given as `./smollm2`. Raises `CheckpointError`.
    """
    if str(path_or_name) == DEMO_TARGET:
        return open_gguf(find_smollm2())
    path = local_path(path_or_name)
    return open_gguf(path) if path.suffix == ".gguf" else open_checkpoint(path)


def open_checkpoint(path_or_id: Path | str) -> Checkpoint:
    """Open a Hugging Face directory: config.json, or the file that a family has instead, with model.safetensors, or
    with shards and their index.

    `path_or_id` is a directory or a Hugging Face id, see `local_path`. Tensors keep their stored names; their bytes are
    read on demand. Raises `CheckpointError` for a directory that cannot be used. Pickled weights are refused and never
    opened, because loading them can run code.
    """
    directory = local_path(path_or_id)
    _refuse_broken_link(directory)
    if not directory.is_dir():
        reason = "is a file, allowed a directory or a .gguf file" if directory.exists() else "no such directory"
        raise CheckpointError(reason, file=directory)
    config_file = directory / CONFIG_FILE
    for name in (CONFIG_FILE, _SINGLE, _INDEX):
        _refuse_broken_link(directory / name)
    for file, architecture in own_config_files(of_others=not config_file.is_file()).items():
        if (directory / file).is_file():
            return _checkpoint(directory, read_json_object(directory / file), directory / file, architecture, {})
    has_weights = (directory / _SINGLE).is_file() or (directory / _INDEX).is_file()
    if not config_file.is_file() and not has_weights:
        raise CheckpointError(f"found neither {CONFIG_FILE} nor {_SINGLE}{_what_else(directory)}", file=directory)
    if not config_file.is_file():
        raise CheckpointError("missing beside the weights", file=directory, field=CONFIG_FILE)
    config = read_json_object(config_file)
    refuse_quantised(config, config_file)
    generation_file = directory / _GENERATION_CONFIG
    generation_config = read_json_object(generation_file) if generation_file.is_file() else {}
    return _checkpoint(directory, config, config_file, _architecture(config, config_file), generation_config)


def with_draft_names(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint of a draft with the tensor names of its format: without `model.`, which some writers put before
    every name.
    """
    return dataclasses.replace(checkpoint, tensors=without_model_prefix(checkpoint.tensors))


def _checkpoint(
    directory: Path,
    config: Mapping[str, Any],
    config_file: Path,
    architecture: str,
    generation_config: Mapping[str, Any],
) -> Checkpoint:
    refuse_quantised_directory(directory)  # before the tensors, whose types and names it explains
    tensors = _open_weights(directory)
    files = sorted({tensor.file for tensor in tensors.values()})
    return Checkpoint(
        path=directory,
        config=config,
        config_file=str(config_file),
        generation_config=generation_config,
        tensors=tensors,
        tensor_files={name: tensor.file for name, tensor in tensors.items()},
        architecture=architecture,
        bytes_on_disk=sum(Path(file).stat().st_size for file in files),
    )


def _architecture(config: Mapping[str, Any], config_file: Path) -> str:
    """The one name in `architectures`; in a config without that list, what its other fields imply."""
    allowed = "a list of exactly one architecture name"
    names = config.get("architectures")
    implied = implied_name(config) if names is None else None
    if implied is not None:
        return implied
    if "architectures" not in config:
        raise missing_field(config_file, "architectures", allowed)
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str) or not names[0]:
        raise field_error(config_file, "architectures", names, allowed)
    return names[0]


def _refuse_broken_link(path: Path) -> None:
    """Raise `CheckpointError` for a link to nothing: it is there, so nobody would look for it by its absence."""
    if path.is_symlink() and not path.exists():
        raise CheckpointError(f"is a link to {os.readlink(path)}, where nothing is", file=path)


def _open_weights(directory: Path) -> dict[str, SafetensorsTensor]:
    single, index_file = directory / _SINGLE, directory / _INDEX
    if not index_file.is_file():
        if not single.is_file():
            raise CheckpointError(f"found no {_SINGLE} and no {_INDEX}{_what_else(directory)}", file=directory)
        return open_safetensors(single)
    weight_map = _weight_map(index_file)
    if single.is_file() and _SINGLE not in weight_map.values():
        raise CheckpointError(f"found {_SINGLE} and an index of other files, allowed one of the two", file=directory)
    return _open_shards(directory, index_file, weight_map)


def _weight_map(index_file: Path) -> dict[str, str]:
    """Tensor name -> shard file. Raises `CheckpointError` for file names that lead out of the directory."""
    weight_map = read_json_object(index_file).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(shard, str) for shard in weight_map.values())
    ):
        raise CheckpointError(
            "missing or malformed, allowed an object of tensor names and file names",
            file=index_file,
            field="weight_map",
            allowed="an object of tensor names and file names",
        )
    for shard in sorted(set(weight_map.values())):
        # POSIX and Windows spellings are both refused, so that a checkpoint means the same on every system.
        paths = PurePosixPath(shard), PureWindowsPath(shard)
        if not shard or "\0" in shard or any(path.anchor or ".." in path.parts for path in paths):
            raise field_error(index_file, "weight_map", shard, "a file inside the checkpoint directory")
    return weight_map


def _open_shards(directory: Path, index_file: Path, weight_map: dict[str, str]) -> dict[str, SafetensorsTensor]:
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        _refuse_broken_link(directory / shard)
    _raise_faults(
        index_file, {"missing": [f"shard {shard}: missing" for shard in shards if not (directory / shard).is_file()]}
    )
    contents = {shard: open_safetensors(directory / shard) for shard in shards}
    absent = [f"tensor {name}: not in {shard}" for name, shard in weight_map.items() if name not in contents[shard]]
    misplaced = [
        f"tensor {name}: in {shard}, but weight_map says {weight_map.get(name, 'nothing')}"
        for shard, tensors in contents.items()
        for name in tensors
        if weight_map.get(name) != shard
    ]
    _raise_faults(index_file, {"absent": absent, "misplaced": misplaced})
    return {name: contents[shard][name] for name, shard in weight_map.items()}


def _raise_faults(file: Path, faults: Mapping[str, list[str]]) -> None:
    if any(faults.values()):
        raise collected_error(file, faults)


def _what_else(directory: Path) -> str:
    """The end of an error message: other files in the directory, and what to do with them."""
    files = sorted(entry for entry in directory.iterdir() if entry.is_file())
    pickled = [file.name for file in files if file.suffix in _PICKLE_SUFFIXES]
    gguf = [file.name for file in files if file.suffix == ".gguf"]
    other = [file.name for file in files if file.suffix == ".safetensors"]
    if pickled:
        return f"; {_listed(pickled)} is refused, because loading a pickle can run code: convert it to safetensors"
    if gguf:
        return f"; to use {_listed(gguf)}, name that file instead of the directory"
    return f"; {_listed(other)} is not a name this format uses" if other else ""


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
