"""A compact draft on disk: `dspark.json`, `model.safetensors` and the `config.json` that makes the directory
discoverable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dspark_jax.architectures.dspark_compact.model import CompactDraft
from dspark_jax.architectures.dspark_compact.weights import compact_recipes, tensors_of
from dspark_jax.architectures.module_loading import load_module
from dspark_jax.speculators_common.errors import CheckpointError
from dspark_jax.speculators_common.files.atomic_directory import replaced_directory
from dspark_jax.speculators_common.formats.compact.format import (
    DSPARK_JSON,
    CompactDims,
    check_label,
    check_target_id,
    from_compact,
    to_compact,
    to_label,
)
from dspark_jax.speculators_common.formats.pair_checks import check_dims
from dspark_jax.speculators_common.formats.weight_adapters import without_model_prefix

LABEL, WEIGHTS = "config.json", "model.safetensors"
_MAX_JSON_BYTES = 10_000_000
_FLOAT_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def save(draft: CompactDraft, directory: Path | str) -> Path:
    """Write `draft` to `directory`, whole or not at all; returns the directory.

    What was there before stays until the new files are complete. `load` gives back equal bits.
    """
    with replaced_directory(directory, replaceable=(DSPARK_JSON, LABEL, WEIGHTS)) as fresh:
        tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors_of(draft).items()}
        save_file(tensors, fresh / WEIGHTS, metadata={"format": "np"})
        for name, content in ((LABEL, to_label(draft.config)), (DSPARK_JSON, to_compact(draft.config))):
            (fresh / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return Path(directory)


def load(
    directory: Path | str,
    *,
    dims: CompactDims | None = None,
    target_id: str | None = None,
    dtype: DTypeLike = jnp.float32,
) -> CompactDraft:
    """The draft in `directory`.

    With `dims` (`init.dims_of(target)`) it is checked against the live target, and its taps are counted by that
    target's depth; with `target_id` its id must be that one. Raises `CheckpointError` for files that cannot be used as
    they are, `PairError` for another target's draft.
    """
    directory = Path(directory)
    file = directory / DSPARK_JSON
    raw = _read_json(file)
    config = from_compact(raw, file)
    if (directory / LABEL).is_file():
        check_label(_read_json(directory / LABEL), directory / LABEL, raw)
    if target_id is not None:
        check_target_id(config, target_id)
    if dims is not None:
        check_dims(config, hidden_size=dims.hidden_size, vocab_size=dims.vocab_size, num_layers=dims.num_layers)
        config = config if dims.num_layers is None else config.for_target(dims.num_layers)
    weights = directory / WEIGHTS
    try:
        with safe_open(str(weights), framework="np") as handle:
            sources = {name: _Stored(handle, name) for name in handle.keys()}  # noqa: SIM118 - the handle is no mapping
            return load_module(
                lambda: CompactDraft(config, dtype=dtype),
                compact_recipes(config),
                without_model_prefix(sources),
                file=str(weights),
            )
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{weights}: cannot be read as safetensors: {error}") from error


class _Stored:
    """A tensor in an open safetensors file."""

    def __init__(self, handle: Any, name: str) -> None:
        self._handle, self._name = handle, name
        described = handle.get_slice(name)
        stored = str(described.get_dtype())
        self.shape, self.dtype = tuple(described.get_shape()), _FLOAT_NAMES.get(stored, stored)

    def read(self) -> np.ndarray:
        array: np.ndarray = self._handle.get_tensor(self._name)
        return array


def _read_json(file: Path) -> Mapping[str, Any]:
    try:
        if file.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{file}: size: found {file.stat().st_size} bytes, allowed at most {_MAX_JSON_BYTES}")
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file}: missing, allowed the file that describes a compact draft") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: found a JSON {type(content).__name__}, allowed an object")
    return content
