"""Registry entry of the speculators-format draft."""

from __future__ import annotations

from typing import Any

from dspark_jax.architectures.drafting.block_weights import block_draft_recipes
from dspark_jax.architectures.dspark_draft.model import DSparkSpeculatorsDraft
from dspark_jax.architectures.registry import SupportedArchitecture
from dspark_jax.speculators_common.formats.draft_config import DraftConfig
from dspark_jax.speculators_common.formats.speculators.reader import from_speculators
from dspark_jax.speculators_common.formats.speculators.writer import to_speculators


def _write(config: DraftConfig, *, dtype: str | None = None) -> dict[str, dict[str, Any]]:
    return {"config.json": to_speculators(config, dtype=dtype)}


ARCHITECTURES = (
    SupportedArchitecture(
        name="DSparkDraftModel",
        aliases=("DSparkSpeculator",),
        kind="draft",
        family="speculators_dspark",
        parse_config=from_speculators,
        build=DSparkSpeculatorsDraft.from_config,
        recipes=block_draft_recipes,
        ignored=lambda config: ("verifier_lm_head.weight", "verifier_norm.weight"),
        write_config=_write,
    ),
)
