"""The registry entry of DSpark drafts in the format of the speculators library."""

from __future__ import annotations

from typing import Any

from dspark_jax.architectures.drafting.block_weights import block_draft_recipes
from dspark_jax.architectures.dspark_draft.model import DSparkSpeculatorsDraft
from dspark_jax.architectures.registry import SupportedArchitecture
from dspark_jax.speculators_common.formats.draft_config import DraftConfig
from dspark_jax.speculators_common.formats.speculators.names import ARCHITECTURES as NAMES
from dspark_jax.speculators_common.formats.speculators.names import DRAFT_FIELDS, FAMILIES, TYPE_FIELD
from dspark_jax.speculators_common.formats.speculators.reader import from_speculators
from dspark_jax.speculators_common.formats.speculators.writer import to_speculators

_NAME, *_ALIASES = NAMES["dspark"]


def _write(config: DraftConfig, *, dtype: str | None = None) -> dict[str, dict[str, Any]]:
    return {"config.json": to_speculators(config, dtype=dtype)}


ARCHITECTURES = (
    SupportedArchitecture(
        name=_NAME,
        aliases=tuple(_ALIASES),
        kind="draft",
        type_field=TYPE_FIELD,
        model_types={"dspark": _NAME},
        draft_fields=DRAFT_FIELDS,
        family=FAMILIES["dspark"],
        parse_config=from_speculators,
        build=DSparkSpeculatorsDraft.from_config,
        recipes=block_draft_recipes,
        ignored=lambda config: ("verifier_lm_head.weight", "verifier_norm.weight"),
        write_config=_write,
    ),
)
