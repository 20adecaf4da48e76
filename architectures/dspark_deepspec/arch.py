"""The registry entries of DeepSpec drafts, one for Qwen3 layers and one for Gemma 4 layers."""

from __future__ import annotations

from typing import Any

from dspark_jax.architectures.drafting.block_weights import block_draft_recipes
from dspark_jax.architectures.dspark_deepspec.gemma4_weights import gemma4_draft_recipes
from dspark_jax.architectures.dspark_deepspec.model import Gemma4DSparkDraft, Qwen3DSparkDraft
from dspark_jax.architectures.registry import SupportedArchitecture
from dspark_jax.speculators_common.formats.deepspec.gemma4_reader import from_deepspec_gemma4
from dspark_jax.speculators_common.formats.deepspec.gemma4_writer import to_deepspec_gemma4
from dspark_jax.speculators_common.formats.deepspec.names import (
    DRAFT_FIELDS,
    GEMMA4_ARCHITECTURE,
    GEMMA4_FAMILY,
    QWEN3_ARCHITECTURE,
    QWEN3_FAMILY,
)
from dspark_jax.speculators_common.formats.deepspec.reader import from_deepspec
from dspark_jax.speculators_common.formats.deepspec.writer import to_deepspec
from dspark_jax.speculators_common.formats.draft_config import DraftConfig


def _write_qwen3(config: DraftConfig, *, dtype: str | None = None) -> dict[str, dict[str, Any]]:
    return {"config.json": to_deepspec(config, dtype=dtype)}


def _write_gemma4(config: DraftConfig, *, dtype: str | None = None) -> dict[str, dict[str, Any]]:
    return {"config.json": to_deepspec_gemma4(config, dtype=dtype)}


ARCHITECTURES = (
    SupportedArchitecture(
        name=QWEN3_ARCHITECTURE,
        kind="draft",
        draft_fields=DRAFT_FIELDS,
        family=QWEN3_FAMILY,
        parse_config=from_deepspec,
        build=Qwen3DSparkDraft,
        recipes=block_draft_recipes,
        write_config=_write_qwen3,
    ),
    SupportedArchitecture(
        name=GEMMA4_ARCHITECTURE,
        kind="draft",
        draft_fields=DRAFT_FIELDS,
        family=GEMMA4_FAMILY,
        parse_config=from_deepspec_gemma4,
        build=Gemma4DSparkDraft,
        recipes=gemma4_draft_recipes,
        write_config=_write_gemma4,
    ),
)
