"""The registry entry of DFlash drafts (arXiv 2602.06036): Qwen3 layers without Markov and confidence heads.

The speculators library and the z-lab implementation use the same architecture name. Other fields of the config say
which of the two wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark_jax.architectures.drafting.block_draft import BlockDraft
from dspark_jax.architectures.drafting.block_weights import block_draft_recipes
from dspark_jax.architectures.registry import SupportedArchitecture
from dspark_jax.speculators_common.formats.draft_config import DraftConfig, DraftOverrides
from dspark_jax.speculators_common.formats.fields import Fields
from dspark_jax.speculators_common.formats.speculators import names as speculators
from dspark_jax.speculators_common.formats.speculators.reader import from_speculators
from dspark_jax.speculators_common.formats.speculators.writer import to_speculators
from dspark_jax.speculators_common.formats.zlab import names as zlab
from dspark_jax.speculators_common.formats.zlab.reader import from_zlab
from dspark_jax.speculators_common.formats.zlab.writer import to_zlab

_NAME, *_ALIASES = speculators.ARCHITECTURES["dflash"]


def _parse(raw: Mapping[str, Any], file: Path | str, overrides: DraftOverrides | None = None) -> DraftConfig:
    """The config in `raw`, the content of `file`, in the speculators or the z-lab format.

    A speculators config states `speculators_model_type`. A z-lab config has none of the speculators library's fields.
    Raises `CheckpointError` for a config that is neither.
    """
    fields = Fields(raw, file)
    if raw.get("architectures") != [zlab.ARCHITECTURE] or fields.has(speculators.TYPE_FIELD):
        return from_speculators(raw, file, overrides)
    if speculators.states_library_fields(fields):
        allowed = f"dflash, as {' or '.join(speculators.LIBRARY_FIELDS)} is stated, or neither of them in a z-lab draft"
        raise fields.missing(speculators.TYPE_FIELD, allowed)
    return from_zlab(raw, file, overrides)


def _training_tensors(config: DraftConfig) -> tuple[str, ...]:
    """Names of tensors to ignore: the speculators library stores some that only its training uses."""
    return () if config.family == zlab.FAMILY else ("verifier_lm_head.weight", "verifier_norm.weight")


def _write(config: DraftConfig, *, dtype: str | None = None) -> dict[str, dict[str, Any]]:
    write = to_zlab if config.family == zlab.FAMILY else to_speculators
    return {"config.json": write(config, dtype=dtype)}


ARCHITECTURES = (
    SupportedArchitecture(
        name=_NAME,
        aliases=tuple(_ALIASES),
        kind="draft",
        type_field=speculators.TYPE_FIELD,
        model_types={"dflash": _NAME},
        draft_fields=(*speculators.DRAFT_FIELDS, *zlab.DRAFT_FIELDS),
        family="dflash",
        parse_config=_parse,
        build=BlockDraft,
        recipes=block_draft_recipes,
        ignored=_training_tensors,
        write_config=_write,
    ),
)
