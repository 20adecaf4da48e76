"""speculators DSpark configs for tests: recorded and changed ones, and the result or the error of the reader."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from dspark_jax.speculators_common.errors import CheckpointError
from dspark_jax.speculators_common.formats.draft_config import DraftConfig, DraftOverrides
from dspark_jax.speculators_common.formats.speculators.reader import from_speculators

DATA = Path(__file__).parents[1] / "data" / "C_speculators"
NESTED = "transformer_layer_config"
DRAFTS = "speculators_config.proposal_methods[0].speculative_tokens"


def stored(variant: str) -> dict[str, Any]:
    return json.loads((DATA / variant / "config.json").read_text())


def changed(raw: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy with values set at dotted paths; `...` removes the field."""
    raw = copy.deepcopy(raw)
    for path, value in changes.items():
        *parents, name = path.split(".")
        owner = raw
        for parent in parents:
            owner = owner.setdefault(parent, {})
        if value is ...:
            owner.pop(name, None)
        else:
            owner[name] = value
    return raw


def base(**changes: Any) -> dict[str, Any]:
    """The config of a small pruned draft: W 5, V 199, Vd 61, two full layers, anchor-first; keys with `__` for the
    dots.
    """
    return changed(
        stored("pruned_anchor_full_vanilla"), {path.replace("__", "."): value for path, value in changes.items()}
    )


def drafts(count: int | None) -> list[dict[str, Any]]:
    return [{"proposal_type": "greedy"} | ({} if count is None else {"speculative_tokens": count})]


def parsed(raw: dict[str, Any], **overrides: Any) -> DraftConfig:
    return from_speculators(raw, "draft/config.json", DraftOverrides(**overrides) if overrides else None)


def refusal(raw: dict[str, Any], **overrides: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        parsed(raw, **overrides)
    assert str(caught.value).startswith("draft/config.json: ")
    assert "\n" not in str(caught.value)
    return str(caught.value)
