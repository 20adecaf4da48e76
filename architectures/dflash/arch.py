"""Registry entry of DFlash drafts: Qwen3 layers without heads. Two libraries use one name for them; the files say which
one wrote them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark_jax.architectures.drafting.block_draft import BlockDraft
from dspark_jax.architectures.drafting.block_weights import block_draft_recipes
from dspark_jax.architectures.registry import SupportedArchitecture
from dspark_jax.speculators_common.formats.detect import draft_family
from dspark_jax.speculators_common.formats.draft_config import DraftConfig, DraftOverrides
from dspark_jax.speculators_common.formats.speculators.reader import from_speculators
from dspark_jax.speculators_common.formats.speculators.writer import to_speculators
from dspark_jax.speculators_common.formats.zlab.reader import from_zlab
from dspark_jax.speculators_common.formats.zlab.writer import to_zlab


def _parse(raw: Mapping[str, Any], file: Path | str, overrides: DraftOverrides | None = None) -> DraftConfig:
    parse = from_zlab if draft_family(raw, file) == "zlab_dflash" else from_speculators
    return parse(raw, file, overrides)


def _training_tensors(config: DraftConfig) -> tuple[str, ...]:
    return ("verifier_lm_head.weight", "verifier_norm.weight") if config.family == "speculators_dflash" else ()


def _write(config: DraftConfig, *, dtype: str | None = None) -> dict[str, dict[str, Any]]:
    write = to_zlab if config.family == "zlab_dflash" else to_speculators
    return {"config.json": write(config, dtype=dtype)}


ARCHITECTURES = (
    SupportedArchitecture(
        name="DFlashDraftModel",
        aliases=("DFlashSpeculator",),
        kind="draft",
        family="dflash",
        parse_config=_parse,
        build=BlockDraft,
        recipes=block_draft_recipes,
        ignored=_training_tensors,
        write_config=_write,
    ),
)
