"""Recorded draft configs of four formats with changed fields, read by the reader of the format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dspark_jax.speculators_common.formats.deepspec.gemma4_reader import from_deepspec_gemma4
from dspark_jax.speculators_common.formats.deepspec.reader import from_deepspec
from dspark_jax.speculators_common.formats.draft_config import DraftConfig, LayerMask
from dspark_jax.speculators_common.formats.speculators.reader import from_speculators
from dspark_jax.speculators_common.formats.zlab.reader import from_zlab

DATA = Path(__file__).parents[1] / "data"
FULL, SLIDING = "full_attention", "sliding_attention"
PLAIN = LayerMask(window=None, causal=False)
ZLAB_ONLY = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": ...,
    "speculators_config": ...,
    "aux_hidden_state_layer_ids": ...,
    "draft_vocab_size": ...,
    "sample_from_anchor": ...,
    "markov_rank": ...,
    "target_layer_ids": [1, 3],
}


def stored(folder: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The config with `changes` at the top level, whatever it says in its nested object; `...` removes a field."""
    raw = json.loads((DATA / folder / "config.json").read_text())
    for name in [name for name in raw.get("transformer_layer_config", {}) if name in changes]:
        raw["transformer_layer_config"].pop(name)
    return {name: value for name, value in (raw | changes).items() if value is not ...}


def speculators(**changes: Any) -> DraftConfig:
    """A DSpark draft of two layers in the speculators format."""
    return from_speculators(stored("C_speculators/pruned_anchor_full_vanilla", changes), "draft/config.json")


def zlab(**changes: Any) -> DraftConfig:
    """The same network in the format of z-lab."""
    return from_zlab(stored("C_speculators/pruned_anchor_full_vanilla", ZLAB_ONLY | changes), "draft/config.json")


def deepspec(**changes: Any) -> DraftConfig:
    """A DeepSpec draft with Qwen3 layers."""
    return from_deepspec(stored("A_deepspec_qwen3/vanilla", changes), "draft/config.json")


def gemma4(**changes: Any) -> DraftConfig:
    """A DeepSpec draft with Gemma4 layers."""
    return from_deepspec_gemma4(stored("B_deepspec_gemma4/keqv_softcap_vanilla", changes), "draft/config.json")


DRAFTS: dict[str, Callable[..., DraftConfig]] = {
    "speculators": speculators,
    "zlab": zlab,
    "deepspec": deepspec,
    "gemma4": gemma4,
}
