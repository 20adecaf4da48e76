"""Describes a checkpoint from its config and the headers of its files.

Nothing is compiled. No weights are read, except embedding and head of a target that stores both and calls them tied,
and the ids of a draft's vocabulary map.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark_jax.architectures.drafting.tables import tables_of
from dspark_jax.architectures.registry import SupportedArchitecture
from dspark_jax.architectures.target_config import TargetConfig
from dspark_jax.pipelines.checkpoints.checkpoint import Checkpoint, open_target, with_draft_names
from dspark_jax.pipelines.checkpoints.load_choices import (
    choice_lines,
    draft_choices,
    in_bytes,
    target_choices,
    template_choices,
)
from dspark_jax.pipelines.checkpoints.loading import check_against, parse_checkpoint, refuse_side_files
from dspark_jax.pipelines.text.stop_tokens import stop_ids, stop_reason, stop_tokens
from dspark_jax.pipelines.text.tokenizer import open_tokenizer
from dspark_jax.pipelines.text.tokenizer_files import unread_tokenizer
from dspark_jax.speculators_common.formats.choice import Choice
from dspark_jax.speculators_common.formats.draft_config import DraftOverrides, LayerMask
from dspark_jax.speculators_common.formats.recipes import TensorSource, check_ids, check_tensors
from dspark_jax.speculators_common.formats.rope.config import RopeConfig
from dspark_jax.speculators_common.numerics.platform import default_platform

# Config fields that a description shows elsewhere.
_SHOWN_ELSEWHERE = frozenset({"architecture", "family", "source", "choices", "unknown_fields"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """One checkpoint whose config was parsed and whose tensors match the config."""

    checkpoint: Checkpoint
    entry: SupportedArchitecture
    config: Any
    num_parameters: int
    stored_as: Mapping[str, int]  # dtype or quantisation -> number of tensors
    choices: tuple[Choice, ...]

    @property
    def unknown_fields(self) -> tuple[str, ...]:
        """Config fields that are not known and have no effect."""
        return tuple(getattr(self.config, "unknown_fields", ()))

    def settings(self) -> dict[str, Any]:
        """The parsed config, without the fields that a description shows elsewhere."""
        return {
            field.name: getattr(self.config, field.name)
            for field in dataclasses.fields(self.config)
            if field.name not in _SHOWN_ELSEWHERE
        }


def describe(path: Path | str, *, kind: str | None = None, overrides: DraftOverrides | None = None) -> Description:
    """Describe the checkpoint at `path`. `kind`, `target` or `draft`, is what it must be; `None` allows both.
    `overrides` replace what a draft's files say.

    Raises `CheckpointError` for every fault in config, headers and vocabulary map that would prevent loading.
    """
    checkpoint = open_target(path)
    entry, config = parse_checkpoint(checkpoint, kind, overrides)
    if entry.kind == "draft":
        checkpoint = with_draft_names(checkpoint)
    recipes = entry.recipes(config, checkpoint.tensors.keys())
    if entry.kind == "draft":
        refuse_side_files(checkpoint)
        tables = tables_of(config, checkpoint.tensors.keys())
        if tables.lm_head == "target_rows":  # the tensor comes from the target, which is not known here
            recipes = {
                parameter: recipe for parameter, recipe in recipes.items() if "lm_head.weight" not in recipe.tensors
            }
    check_tensors(recipes, checkpoint.tensors, file=str(checkpoint.path), ignored=tuple(entry.ignored(config)))
    check_ids(recipes, checkpoint.tensors)
    weights = [tensor for tensor in checkpoint.tensors.values() if "float" in tensor.dtype]
    return Description(
        checkpoint=checkpoint,
        entry=entry,
        config=config,
        num_parameters=sum(math.prod(tensor.shape) for tensor in weights),
        stored_as=collections.Counter(_stored_as(tensor) for tensor in checkpoint.tensors.values()),
        choices=draft_choices(config, tables) if entry.kind == "draft" else _target_choices(checkpoint, config),
    )


def check_described_pair(target: Description, draft: Description) -> None:
    """Raise a `PairError` that says why, unless the draft can work with the target."""
    check_against(draft.config, target.config)


def description_lines(description: Description) -> list[str]:
    """For a reader: what it is, what was decided, and the normalised config, one field a line."""
    checkpoint, entry = description.checkpoint, description.entry
    stored = ", ".join(f"{count} {name}" for name, count in description.stored_as.items())
    facts = {
        "architecture": checkpoint.architecture,
        "kind": f"{entry.kind}, family {entry.family}",
        "parameters": f"{description.num_parameters:,} in {len(checkpoint.tensors)} tensors ({stored})",
        "on disk": in_bytes(checkpoint.bytes_on_disk),
        "attention backend": default_platform().attention,
        "unknown fields": ", ".join(description.unknown_fields) or "none",
    }
    return [
        str(checkpoint.path),
        *(f"  {name:<20}{value}" for name, value in facts.items()),
        *(f"  {line}" for line in choice_lines(description.choices)),
        "  config",
        *(f"    {name:<28}{_shown(value)}" for name, value in description.settings().items()),
    ]


def description_json(description: Description) -> dict[str, Any]:
    """The description as a JSON object."""
    checkpoint, entry = description.checkpoint, description.entry
    return {
        "path": str(checkpoint.path),
        "architecture": checkpoint.architecture,
        "kind": entry.kind,
        "family": entry.family,
        "num_parameters": description.num_parameters,
        "num_tensors": len(checkpoint.tensors),
        "stored_as": dict(description.stored_as),
        "bytes_on_disk": checkpoint.bytes_on_disk,
        "choices": [dataclasses.asdict(choice) for choice in description.choices],
        "attention": default_platform().attention,
        "config": {name: _plain(value) for name, value in description.settings().items()},
        "unknown_fields": list(description.unknown_fields),
    }


def _target_choices(checkpoint: Checkpoint, config: TargetConfig) -> tuple[Choice, ...]:
    tokenizer = open_tokenizer(checkpoint)
    stops = stop_tokens(checkpoint, tokenizer, config.vocab_size)
    text, unread = "none: prompts are token ids", unread_tokenizer(checkpoint.path)
    if tokenizer is not None:
        text = f"{tokenizer.vocab_size} tokens, {'with' if tokenizer.chat_template else 'without'} chat template"
    template = {choice.name: choice for choice in template_choices(tokenizer)}
    head = "tied to embed_tokens" if getattr(config, "tie_word_embeddings", False) else "its own"
    choices = {choice.name: choice for choice in target_choices(config)}
    rows = (
        ("embed_tokens", "its own", "", ""),
        ("lm_head", head, "", ""),
        ("tokenizer", text, f"the directory {unread}" if unread and tokenizer is None else "", ""),
        ("stop_ids", ", ".join(map(str, stop_ids(stops))) or "none", stop_reason(stops), "--stop-ids"),
    )
    known = {name: Choice(name=name, value=value, reason=reason, flag=flag) for name, value, reason, flag in rows}
    return tuple({**known, **choices, **template}.values())


def _stored_as(tensor: TensorSource) -> str:
    quantisation = getattr(tensor, "quantisation", None)
    return tensor.dtype if quantisation is None else str(quantisation.name)


def _shown(value: Any) -> str:
    """A config value as text. Equal values that follow each other in a tuple are counted."""
    if isinstance(value, LayerMask):
        return (
            f"{'all context' if value.window is None else f'window {value.window}'}, "
            f"{'causal' if value.causal else 'bidirectional'} in the block"
        )
    if isinstance(value, RopeConfig) and value.kind == "default":
        return f"theta {value.theta}, rotary_dim {value.rotary_dim}, not scaled"
    if dataclasses.is_dataclass(value):
        return ", ".join(f"{field.name} {_shown(getattr(value, field.name))}" for field in dataclasses.fields(value))
    if isinstance(value, tuple):
        groups = [(item, len(list(group))) for item, group in itertools.groupby(value)]
        return (
            ", ".join(_shown(item) if count == 1 else f"{count} x ({_shown(item)})" for item, count in groups) or "none"
        )
    return "none" if value is None else json.dumps(value) if isinstance(value, bool) else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
