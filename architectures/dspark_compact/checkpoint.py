"""Save and load a compact draft. Its directory has `dspark.json`, `model.safetensors` and a `config.json`.

`dspark.json` describes the draft. The `config.json` only lets other tools recognise the directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from dspark_jax.architectures.dspark_compact.model import CompactDraft
from dspark_jax.architectures.dspark_compact.weights import compact_recipes
from dspark_jax.architectures.module_loading import load_module
from dspark_jax.architectures.module_saving import WEIGHTS, save_draft
from dspark_jax.speculators_common.errors import missing_field
from dspark_jax.speculators_common.files.json_file import read_json_object
from dspark_jax.speculators_common.files.safetensors_file import open_safetensors
from dspark_jax.speculators_common.formats.compact.format import (
    DSPARK_JSON,
    CompactDims,
    check_config_json,
    check_target_id,
    from_compact,
)
from dspark_jax.speculators_common.formats.draft_config import DraftConfig, DraftOverrides
from dspark_jax.speculators_common.formats.pair_checks import check_dims
from dspark_jax.speculators_common.formats.recipes import without_model_prefix

_LABEL = "config.json"


def save(draft: CompactDraft, directory: Path | str) -> Path:
    """Write `draft` to `directory` in float32, the dtype of the format, and return the directory.

    An existing directory is replaced only when the new files are complete. `load` returns the same values, bit for bit.
    """
    return save_draft(draft, directory, dtype=jnp.float32)


def parse_compact(raw: Mapping[str, Any], file: Path | str, overrides: DraftOverrides | None = None) -> DraftConfig:
    """The config in `raw`, the content of the `dspark.json` at `file`.

    A `config.json` beside it is optional and must not contradict it. Raises `CheckpointError` for a config that the
    format does not allow, and for a contradiction.
    """
    label = Path(file).with_name(_LABEL)
    if label != Path(file) and label.is_file():
        check_config_json(read_json_object(label), label, raw)
    return from_compact(raw, file, overrides)


def load(
    directory: Path | str,
    *,
    dims: CompactDims | None = None,
    target_id: str | None = None,
    dtype: DTypeLike = jnp.float32,
) -> CompactDraft:
    """The draft in `directory`, with parameters of `dtype`.

    `dims` are the sizes of the target (`init.dims_of(target)`). If given, the draft must fit them, and the depth of the
    target says which tap is the state after the final norm. If `target_id` is given, the draft must state the same id.

    Raises `CheckpointError` for files that are not a valid compact draft, `PairError` for a draft of another target.
    """
    directory = Path(directory)
    file = directory / DSPARK_JSON
    if not file.is_file():
        raise missing_field(directory, DSPARK_JSON, "the file that describes a compact draft")
    config = parse_compact(read_json_object(file), file)
    if target_id is not None:
        check_target_id(config, target_id)
    if dims is not None:
        check_dims(config, hidden_size=dims.hidden_size, vocab_size=dims.vocab_size, num_layers=dims.num_layers)
        config = config if dims.num_layers is None else config.for_target(dims.num_layers)
    weights = directory / WEIGHTS
    return load_module(
        lambda: CompactDraft(config, dtype=dtype),
        compact_recipes(config),
        without_model_prefix(open_safetensors(weights)),
        file=str(weights),
    )
