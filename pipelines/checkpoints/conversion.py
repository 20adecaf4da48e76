"""A draft from one published format to the other: the same tensors under another `config.json`, written whole or not at
all, and checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dspark_jax.architectures.drafting.tables import borrowed_tensors, tables_of
from dspark_jax.architectures.module_saving import WEIGHTS
from dspark_jax.architectures.registry import CONFIG_FILE, SupportedArchitecture, retrieve
from dspark_jax.pipelines.checkpoints.checkpoint import Checkpoint, open_checkpoint, open_target, with_draft_names
from dspark_jax.pipelines.checkpoints.draft_equality import check_equal_drafts
from dspark_jax.pipelines.checkpoints.loading import (
    check_against,
    parse_checkpoint,
    planned_draft,
    read_draft,
    refuse_side_files,
    target_table,
)
from dspark_jax.speculators_common.errors import CheckpointError, RequestError, field_error
from dspark_jax.speculators_common.files.atomic_directory import check_absent, new_directory
from dspark_jax.speculators_common.files.json_file import write_json_object
from dspark_jax.speculators_common.files.safetensors_file import numpy_dtype, write_safetensors
from dspark_jax.speculators_common.formats.conversions import FORMATS, DraftFormat
from dspark_jax.speculators_common.formats.draft_config import DraftConfig, DraftOverrides
from dspark_jax.speculators_common.formats.recipes import TensorSource, check_tensors

_TABLES = ("embed_tokens.weight", "lm_head.weight")
_CONFIDENCE_WEIGHT, _CONFIDENCE_BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"
_FROM_ELSEWHERE = (*_TABLES, _CONFIDENCE_BIAS)  # tensors that a file may lack


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion:
    """What was written, and what the check compared. `notes` are the decisions that a user may want to know of, a
    sentence each.
    """

    config: DraftConfig
    num_tensors: int
    num_parameters: int
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Source:
    """The draft to convert. `borrowed` are the target's tables that stand for missing tensors, if a target
    was given.
    """

    checkpoint: Checkpoint
    entry: SupportedArchitecture
    config: DraftConfig
    borrowed: Mapping[str, TensorSource]


def convert_draft(
    source: Path | str,
    destination: Path | str,
    to: str,
    *,
    target: Path | str | None = None,
    target_name: str | None = None,
    overrides: DraftOverrides | None = None,
) -> Conversion:
    """Write the draft in directory `source` to the new directory `destination` in the format `to`, one of `FORMATS`.

    `target` is the draft's target: it supplies what the destination states or stores and the source lacks, which are
    the target's depth, embedding and head. `target_name` is stated as the name of the target, where the format has room
    for it. Tensors keep their bits and dtypes. Before the destination appears, both drafts are loaded and compared
    (`check_equal_drafts`). Raises `CheckpointError` for a source that cannot be used or not be expressed, `PairError`
    for a target that is not the source's; then there is no destination.
    """
    check_absent(destination)
    if to not in FORMATS:
        raise RequestError(f"found {to!r}, allowed {', '.join(FORMATS)}", field="format")
    written = FORMATS[to]
    if target_name is not None and written.target_name_field is None:
        raise RequestError(
            f"target name: found {target_name!r}, allowed none: the {written.title} format has no field for it"
        )
    draft = _open_source(source, written, target, target_name, overrides)
    raw = written.write(draft.config, dtype=_stored_dtype(draft.checkpoint))
    entry = retrieve(raw["architectures"][0])
    planned = entry.parse_config(raw, str(Path(destination) / CONFIG_FILE), None)
    tensors = _planned_tensors(draft, written, entry, planned)
    with new_directory(destination) as fresh:
        write_json_object(fresh / CONFIG_FILE, raw)
        write_safetensors(fresh / WEIGHTS, {name: tensor.read() for name, tensor in tensors.items()})
        num_parameters = _check(draft, fresh)
    return Conversion(
        config=planned,
        num_tensors=len(tensors),
        num_parameters=num_parameters,
        notes=_notes(draft, written, planned, tensors),
    )


def _open_source(
    path: Path | str,
    written: DraftFormat,
    target: Path | str | None,
    target_name: str | None,
    overrides: DraftOverrides | None,
) -> _Source:
    """The source, checked as for running it as far as headers show, and completed with what is known of its target."""
    checkpoint = with_draft_names(open_checkpoint(path))
    entry, config = parse_checkpoint(checkpoint, "draft", overrides)
    if config.family in written.families:
        raise field_error(
            checkpoint.config_file,
            "architectures",
            checkpoint.architecture,
            f"a draft that is not in the {written.title} format already",
        )
    refuse_side_files(checkpoint)
    elsewhere = borrowed_tensors(tables_of(config, checkpoint.tensors.keys()))
    recipes = {
        parameter: recipe
        for parameter, recipe in entry.recipes(config, checkpoint.tensors.keys()).items()
        if not elsewhere.intersection(recipe.tensors)
    }
    check_tensors(recipes, checkpoint.tensors, file=str(checkpoint.path), ignored=tuple(entry.ignored(config)))
    borrowed: dict[str, TensorSource] = {}
    if target is not None:
        opened = open_target(target)
        _, target_config = parse_checkpoint(opened, "target")
        check_against(config, target_config)
        config = dataclasses.replace(
            config.for_target(target_config.num_hidden_layers),
            num_target_layers=target_config.num_hidden_layers,
            target_architectures=config.target_architectures or (opened.architecture,),
        )
        if written.always_stores_tables:
            borrowed = {name: target_table(opened, name, config) for name in _TABLES if name not in checkpoint.tensors}
            config = dataclasses.replace(config, stores_tables=True)
    config = dataclasses.replace(config, target_name=target_name or config.target_name)
    return _Source(checkpoint=checkpoint, entry=entry, config=config, borrowed=borrowed)


def _planned_tensors(
    draft: _Source, written: DraftFormat, entry: SupportedArchitecture, planned: DraftConfig
) -> dict[str, TensorSource]:
    """Name -> tensor of everything to be written, in the order of the weight recipes."""
    available = {**draft.checkpoint.tensors, **draft.borrowed}
    if _CONFIDENCE_BIAS not in available and _CONFIDENCE_WEIGHT in available:
        available[_CONFIDENCE_BIAS] = _Zero(available[_CONFIDENCE_WEIGHT].dtype)
    optional = [
        name for name in _FROM_ELSEWHERE if name in available or (name in _TABLES and written.always_stores_tables)
    ]
    recipes = entry.recipes(planned, optional)
    names = [name for recipe in recipes.values() for name in recipe.tensors]
    missing = [name for name in names if name not in available]
    if missing:
        of_target = f" ({draft.config.target_name!r} by its config)" if draft.config.target_name else ""
        listed = ", ".join(missing)
        raise CheckpointError(
            f"{draft.checkpoint.path}: tensor {listed}: missing, allowed a checkpoint that holds it, as every "
            f"{written.title} draft does, "
            f"or --target DIR with the draft's target{of_target}"
        )
    check_tensors(recipes, {name: available[name] for name in names}, file=str(draft.checkpoint.path))
    return {name: available[name] for name in names}


def _check(draft: _Source, directory: Path) -> int:
    """Load source and destination as for running them and compare; the number of parameters compared."""
    written = open_checkpoint(directory)
    entry, config = parse_checkpoint(written, "draft")
    completed = {**draft.checkpoint.tensors, **draft.borrowed}
    # In the dtype of the files, where that is bfloat16 throughout; in float32 every stored value is exact as well.
    names = {tensor.dtype for tensor in written.tensors.values() if "float" in tensor.dtype}
    dtype = "bfloat16" if names == {"bfloat16"} else "float32"
    first = planned_draft(
        draft.checkpoint, draft.entry, draft.config, tables_of(draft.config, completed.keys()), completed, dtype
    )
    second = planned_draft(written, entry, config, tables_of(config, written.tensors.keys()), written.tensors, dtype)
    return check_equal_drafts(read_draft(first), read_draft(second))


def _stored_dtype(checkpoint: Checkpoint) -> str:
    """What a config should say of the tensors; drafts store one dtype, but for small heads perhaps."""
    return checkpoint.tensors["fc.weight"].dtype if "fc.weight" in checkpoint.tensors else "float32"


def _notes(
    draft: _Source, written: DraftFormat, planned: DraftConfig, tensors: Mapping[str, TensorSource]
) -> tuple[str, ...]:
    notes = [f"{choice.name}: taken as {choice.value} ({choice.reason})" for choice in draft.config.choices]
    notes += [f"{name}: not carried over, a field of no known meaning" for name in draft.config.unknown_fields]
    notes += [f"{name}: taken from the target" for name in draft.borrowed]
    if _CONFIDENCE_BIAS in tensors and _CONFIDENCE_BIAS not in draft.checkpoint.tensors:
        notes.append(f"{_CONFIDENCE_BIAS}: zero is written, as the draft has none")
    if any(layer.causal and layer.window is None for layer in planned.layers):
        notes.append("causal: true is written; not every reader of the format knows this field")
    if written.target_name_field is not None and planned.target_name is None:
        notes.append(
            f"{written.target_name_field}: null is written; --target-name NAME states it for readers that find the "
            "target by it"
        )
    return tuple(notes)


@dataclasses.dataclass(frozen=True)
class _Zero:
    """A tensor of one zero."""

    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        return (1,)

    def read(self) -> np.ndarray:
        return np.zeros((1,), numpy_dtype(self.dtype))
