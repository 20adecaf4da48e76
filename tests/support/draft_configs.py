"""Draft configs of the published formats, for tests of the writers."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from dspark_jax.speculators_common.formats.deepspec.gemma4_reader import from_deepspec_gemma4
from dspark_jax.speculators_common.formats.deepspec.reader import from_deepspec
from dspark_jax.speculators_common.formats.draft_config import DraftConfig
from dspark_jax.speculators_common.formats.rope.config import RopeConfig
from dspark_jax.speculators_common.formats.speculators.reader import from_speculators

DATA = Path(__file__).parents[1] / "data"
ROPES = {
    "default": RopeConfig(theta=5e5, rotary_dim=16),
    "linear": RopeConfig(theta=1e4, rotary_dim=16, kind="linear", factor=2.5),
    "llama3": RopeConfig(
        theta=5e5,
        rotary_dim=16,
        kind="llama3",
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
    "yarn": RopeConfig(
        theta=1e6,
        rotary_dim=16,
        kind="yarn",
        factor=4.0,
        original_max_position_embeddings=32768,
        attention_factor=0.1 * math.log(4.0) + 1.0,
    ),
    "yarn, own values": RopeConfig(
        theta=1e6,
        rotary_dim=16,
        kind="yarn",
        factor=1.5,
        original_max_position_embeddings=64,
        attention_factor=0.7,
        beta_fast=9.0,
        beta_slow=0.25,
    ),
    "linear, with its original length": RopeConfig(
        theta=1e6, rotary_dim=16, kind="linear", factor=2.0, original_max_position_embeddings=4096
    ),
}


def raw(folder: Path, name: str = "config.json") -> dict[str, Any]:
    return json.loads((folder / name).read_text())


def speculators(**changes: Any) -> DraftConfig:
    """A speculators draft of two full layers over 61 of 199 ids."""
    config = from_speculators(raw(DATA / "C_speculators" / "pruned_anchor_full_vanilla"), "draft/config.json")
    return dataclasses.replace(config, **changes)


def deepspec(**changes: Any) -> DraftConfig:
    return dataclasses.replace(
        from_deepspec(raw(DATA / "A_deepspec_qwen3" / "vanilla"), "draft/config.json"), **changes
    )


def gemma4(**changes: Any) -> DraftConfig:
    config = from_deepspec_gemma4(raw(DATA / "B_deepspec_gemma4" / "keqv_softcap_vanilla"), "draft/config.json")
    return dataclasses.replace(config, **changes)
