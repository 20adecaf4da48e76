"""The registry entry of the compact draft."""

from __future__ import annotations

from typing import Any

from dspark_jax.architectures.dspark_compact.checkpoint import parse_compact
from dspark_jax.architectures.dspark_compact.model import CompactDraft
from dspark_jax.architectures.dspark_compact.weights import compact_recipes
from dspark_jax.architectures.registry import SupportedArchitecture
from dspark_jax.speculators_common.formats.compact.format import (
    ARCHITECTURE,
    DSPARK_JSON,
    FAMILY,
    to_compact,
    to_config_json,
)
from dspark_jax.speculators_common.formats.draft_config import DraftConfig


def _write(config: DraftConfig, *, dtype: str | None = None) -> dict[str, dict[str, Any]]:
    """The content of both JSON files. The format states no dtype, because its tensors are always float32."""
    return {"config.json": to_config_json(config), DSPARK_JSON: to_compact(config)}


ARCHITECTURES = (
    SupportedArchitecture(
        name=ARCHITECTURE,
        kind="draft",
        family=FAMILY,
        config_file=DSPARK_JSON,
        parse_config=parse_compact,
        build=CompactDraft,
        recipes=compact_recipes,
        write_config=_write,
    ),
)
