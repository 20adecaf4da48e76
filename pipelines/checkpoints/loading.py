"""Loads a target, and a draft for it. Each is first prepared (all checks, no weights) and then read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from dspark_jax.architectures.decoder.recurrent_state import refuse_recurrent_state
from dspark_jax.architectures.drafting.tables import DraftTables, tables_of
from dspark_jax.architectures.module_loading import fill_module
from dspark_jax.architectures.registry import SupportedArchitecture, retrieve
from dspark_jax.architectures.target_config import TargetConfig
from dspark_jax.pipelines.checkpoints.checkpoint import Checkpoint, open_checkpoint, open_target, with_draft_names
from dspark_jax.pipelines.checkpoints.stored_head import with_stored_head
from dspark_jax.pipelines.text.stop_tokens import StopToken, stop_ids, stop_tokens
from dspark_jax.pipelines.text.tokenizer import Tokenizer, open_tokenizer
from dspark_jax.speculators_common.errors import CheckpointError, PairError
from dspark_jax.speculators_common.formats.draft_config import DraftConfig, DraftOverrides
from dspark_jax.speculators_common.formats.pair_checks import check_pair
from dspark_jax.speculators_common.formats.recipes import TensorSource, check_ids, check_tensors
from dspark_jax.speculators_common.heads.vocab_map import target_id_table

_WEIGHT_SUFFIXES = frozenset({".safetensors", ".pt", ".pth", ".bin", ".npy", ".npz"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedTarget:
    """A target whose config, headers and tokenizer are checked, but whose weights are not read."""

    abstract: Any  # its module, with shapes instead of arrays
    entry: SupportedArchitecture
    config: TargetConfig
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None  # None: the checkpoint has none, and the model takes and gives ids
    stop_tokens: tuple[StopToken, ...]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids of the stop tokens that are in the vocabulary."""
        return stop_ids(self.stop_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedDraft:
    """A draft whose files are checked, also against its target, but whose weights are not read."""

    abstract: Any  # its module, with shapes instead of arrays
    entry: SupportedArchitecture
    config: DraftConfig
    tables: DraftTables
    checkpoint: Checkpoint
    tensors: Mapping[str, TensorSource]  # that the module is filled from, with those taken from the target


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedTarget:
    """A target ready to run."""

    module: Any  # an `nnx.Module` that is a `Target`
    config: TargetConfig
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    stop_tokens: tuple[StopToken, ...]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids of the stop tokens that are in the vocabulary."""
        return stop_ids(self.stop_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedDraft:
    """A draft ready to run with the target it was loaded for."""

    module: Any  # an `nnx.Module` that is a `Draft`
    config: DraftConfig
    tables: DraftTables
    checkpoint: Checkpoint


AnyTarget = PreparedTarget | LoadedTarget
AnyDraft = PreparedDraft | LoadedDraft


def parse_checkpoint(
    checkpoint: Checkpoint, kind: str | None, overrides: DraftOverrides | None = None
) -> tuple[SupportedArchitecture, Any]:
    """The registry entry and the parsed config of a checkpoint.

    `kind`, `target` or `draft`, is what the checkpoint must be; `None` allows both. `overrides` are for drafts. Raises
    `CheckpointError` for an unknown architecture, for the other kind, and for a config that is not supported.
    """
    try:
        entry = retrieve(checkpoint.architecture)
    except CheckpointError as error:
        if kind != "draft":
            refuse_recurrent_state(checkpoint.config, checkpoint.config_file)
        raise CheckpointError(
            str(error), file=checkpoint.config_file, field="architectures", found=checkpoint.architecture
        ) from None
    if kind not in (None, entry.kind):
        raise CheckpointError(
            f"found {checkpoint.architecture!r}, a {entry.kind}, allowed a {kind}",
            file=checkpoint.config_file,
            field="architectures",
            found=checkpoint.architecture,
            allowed=f"a {kind}",
        )
    if entry.kind == "target":
        refuse_recurrent_state(checkpoint.config, checkpoint.config_file)
        overrides = None
    config = entry.parse_config(checkpoint.config, checkpoint.config_file, overrides)
    return entry, with_stored_head(entry, config, checkpoint)


def prepare_target(path: Path | str, dtype: DTypeLike) -> PreparedTarget:
    """Check the target at `path` (directory, id, .gguf file or `smollm2`) for arrays in `dtype`.

    No weights are read, except embedding and head of a target that stores both and calls them tied. Raises
    `DSparkError`.
    """
    checkpoint = open_target(path)
    entry, config = parse_checkpoint(checkpoint, "target")
    check_tensors(
        entry.recipes(config, checkpoint.tensors.keys()),
        checkpoint.tensors,
        file=str(checkpoint.path),
        ignored=entry.ignored(config),
    )
    tokenizer = open_tokenizer(checkpoint)
    return PreparedTarget(
        abstract=nnx.eval_shape(lambda: entry.build(config, dtype=dtype)),
        entry=entry,
        config=config,
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        stop_tokens=stop_tokens(checkpoint, tokenizer, config.vocab_size),
    )


def prepare_draft(
    path: Path | str, target: AnyTarget, dtype: DTypeLike, overrides: DraftOverrides | None = None
) -> PreparedDraft:
    """Check the draft at `path` (directory or id) against `target`, for arrays in `dtype`.

    No weights are read, except the ids of a vocabulary map. Raises `DSparkError`.
    """
    checkpoint = with_draft_names(open_checkpoint(path))
    entry, config = parse_checkpoint(checkpoint, "draft", overrides)
    check_against(config, target.config)
    refuse_side_files(checkpoint)
    config = config.for_target(target.config.num_hidden_layers)
    tables = tables_of(config, checkpoint.tensors.keys())
    check_borrowed(config, tables, target.config)
    tensors = with_target_rows(checkpoint.tensors, config, tables, target.checkpoint)
    return planned_draft(checkpoint, entry, config, tables, tensors, dtype)


def planned_draft(
    checkpoint: Checkpoint,
    entry: SupportedArchitecture,
    config: DraftConfig,
    tables: DraftTables,
    tensors: Mapping[str, TensorSource],
    dtype: DTypeLike,
) -> PreparedDraft:
    """Check a parsed draft whose module will be filled from `tensors`: those of its checkpoint, and those that `tables`
    takes from the target.
    """
    recipes = entry.recipes(config, tensors.keys())
    check_tensors(recipes, tensors, file=str(checkpoint.path), ignored=entry.ignored(config))
    check_ids(recipes, tensors)
    abstract = nnx.eval_shape(lambda: entry.build(config, dtype=dtype, tables=tables))
    return PreparedDraft(
        abstract=abstract, entry=entry, config=config, tables=tables, checkpoint=checkpoint, tensors=tensors
    )


def read_target(target: PreparedTarget) -> LoadedTarget:
    """Read the weights of a prepared target."""
    module = _filled(target, target.checkpoint.tensors)
    return LoadedTarget(
        module=module,
        config=target.config,
        checkpoint=target.checkpoint,
        tokenizer=target.tokenizer,
        stop_tokens=target.stop_tokens,
    )


def read_draft(draft: PreparedDraft) -> LoadedDraft:
    """Read the weights of a prepared draft."""
    return LoadedDraft(
        module=_filled(draft, draft.tensors), config=draft.config, tables=draft.tables, checkpoint=draft.checkpoint
    )


def load_target(path: Path | str, dtype: DTypeLike) -> LoadedTarget:
    """`prepare_target`, then `read_target`."""
    return read_target(prepare_target(path, dtype))


def load_draft(
    path: Path | str, target: AnyTarget, dtype: DTypeLike, overrides: DraftOverrides | None = None
) -> LoadedDraft:
    """`prepare_draft`, then `read_draft`."""
    return read_draft(prepare_draft(path, target, dtype, overrides))


def _filled(prepared: PreparedTarget | PreparedDraft, tensors: Mapping[str, TensorSource]) -> Any:
    entry, config = prepared.entry, prepared.config
    recipes, ignored = entry.recipes(config, tensors.keys()), tuple(entry.ignored(config))
    return fill_module(prepared.abstract, recipes, tensors, file=str(prepared.checkpoint.path), ignored=ignored)


def check_against(draft: DraftConfig, target_config: TargetConfig) -> None:
    """Raise `PairError` unless this draft fits this target."""
    check_pair(
        draft,
        hidden_size=target_config.hidden_size,
        vocab_size=target_config.vocab_size,
        num_layers=target_config.num_hidden_layers,
        target_architecture=target_config.architecture,
        target_file=target_config.source,
    )


def refuse_side_files(checkpoint: Checkpoint) -> None:
    """Raise `CheckpointError` for a file beside the weights that holds the mask embedding.

    Some exports write such a file. No format here reads it, and without it fewer drafts would be accepted.
    """
    used = set(checkpoint.tensor_files.values())
    sides = [
        file
        for file in sorted(checkpoint.path.glob("*mask*"))
        if file.suffix in _WEIGHT_SUFFIXES and str(file) not in used
    ]
    if sides:
        raise CheckpointError(
            f"a mask embedding in a file of its own is not supported; allowed {checkpoint.config_file} and its weights",
            file=sides[0],
        )


def check_borrowed(draft: DraftConfig, tables: DraftTables, target_config: TargetConfig) -> None:
    """Raise `PairError` if the draft borrows tables of the target whose width is not the draft's."""
    borrowed = [name for name in ("embed_tokens", "lm_head") if getattr(tables, name) != "own"]
    if borrowed and draft.table_width != target_config.hidden_size:
        raise PairError(
            file=draft.source,
            field="hidden_size",
            found=draft.hidden_size,
            allowed=f"{target_config.hidden_size}: {' and '.join(borrowed)} would be the target's "
            f"({target_config.source})",
        )


def with_target_rows(
    tensors: Mapping[str, TensorSource], config: DraftConfig, tables: DraftTables, target: Checkpoint
) -> Mapping[str, TensorSource]:
    """The draft's tensors. If the file lacks a pruned head, `lm_head.weight` is added: those rows of the target's head
    that belong to the draft vocabulary, in the order of draft ids.
    """
    if tables.lm_head != "target_rows":
        return tensors
    stored = {name: tensors[name].read() for name in ("d2t", "t2d") if name in tensors}
    ids = target_id_table(
        vocab_size=config.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        file=Path(config.source).parent,
        **stored,
    )
    head = target_table(target, "lm_head.weight", config)
    return {**tensors, "lm_head.weight": _Rows(head, np.asarray(ids))}


def target_table(target: Checkpoint, name: str, draft: DraftConfig) -> TensorSource:
    """The target's embedding or head, for the tensor `name` that the draft lacks. A tied target stores one for both.

    Raises `PairError` if the target has neither.
    """
    tables = ("embed_tokens.weight", "lm_head.weight")
    names = tables[::-1] if name == "lm_head.weight" else tables
    # Multimodal checkpoints put a prefix before the name.
    found = [stored for table in names for stored in target.tensors if f".{stored}".endswith(f".{table}")]
    if not found:
        raise PairError(f"no {name} in the draft, and none to share in {target.path}", file=draft.source)
    return target.tensors[found[0]]


@dataclasses.dataclass(frozen=True)
class _Rows:
    """A tensor made of some rows of another tensor."""

    source: TensorSource
    rows: np.ndarray

    @property
    def file(self) -> str:
        return str(getattr(self.source, "file", ""))

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.source.shape[1:])

    @property
    def dtype(self) -> str:
        return self.source.dtype

    def read(self) -> np.ndarray:
        return self.source.read()[self.rows]
