"""Which draft family a checkpoint belongs to. One string is not enough: the same architecture name is used for
unrelated checkpoints.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from dspark_jax.speculators_common.errors import CheckpointError, field_error
from dspark_jax.speculators_common.formats.fields import Fields

DraftFamily = Literal[
    "speculators_dspark", "speculators_dflash", "deepspec_qwen3", "deepspec_gemma4", "zlab_dflash", "compact"
]

FAMILY_TITLES: Mapping[DraftFamily, str] = {
    "speculators_dspark": "speculators DSpark",
    "speculators_dflash": "speculators DFlash",
    "deepspec_qwen3": "DeepSpec Qwen3",
    "deepspec_gemma4": "DeepSpec Gemma4",
    "zlab_dflash": "z-lab DFlash",
    "compact": "compact DSpark",
}

_SPECULATORS_FAMILIES: Mapping[str, DraftFamily] = {"dspark": "speculators_dspark", "dflash": "speculators_dflash"}
_SPECULATORS_ARCHITECTURES = {
    "dspark": ("DSparkDraftModel", "DSparkSpeculator"),
    "dflash": ("DFlashDraftModel", "DFlashSpeculator"),
}
_OTHER_ARCHITECTURES: Mapping[str, DraftFamily] = {
    "Qwen3DSparkModel": "deepspec_qwen3",
    "Gemma4DSparkModel": "deepspec_gemma4",
    "DFlashDraftModel": "zlab_dflash",
    "DsparkDrafter": "compact",
}
_SPECULATORS_FIELDS = ("speculators_config", "aux_hidden_state_layer_ids")  # in no draft of another library
_BLOCK_FIELDS = ("dflash_config", "dspark_config", "target_layer_ids", "mask_token_id", "markov_rank")  # of any draft
_REFUSED_MARKERS = {"DeepseekV4": "DeepSeek-V4", "DFlash2": "DFlash2", "Eagle": "Eagle"}
_KNOWN_ARCHITECTURES = tuple(
    sorted({*_OTHER_ARCHITECTURES, *(name for names in _SPECULATORS_ARCHITECTURES.values() for name in names)})
)


def draft_family(raw: Mapping[str, Any], file: Path | str, *, has_dspark_json: bool = False) -> DraftFamily:
    """The family of the `config.json` content `raw`.

    Decided by a `dspark.json` in the same directory, then by `speculators_model_type`, then by the one name in
    `architectures`. Raises `CheckpointError` for a family that is not supported, an unknown or missing name, and fields
    that contradict each other.
    """
    if has_dspark_json:
        return "compact"
    fields = Fields(raw, file)
    architecture = only_architecture(fields, default=implied_draft_architecture(raw))
    _refuse_by_name(fields, architecture)
    if architecture not in _KNOWN_ARCHITECTURES:
        near = difflib.get_close_matches(architecture, _KNOWN_ARCHITECTURES, n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise field_error(file, "architectures", architecture, ", ".join(_KNOWN_ARCHITECTURES) + hint)
    if fields.has("speculators_model_type"):
        return _speculators_family(fields, architecture)
    if architecture == "DFlashDraftModel" and any(
        place.has(name) for place in _block_places(fields) for name in _SPECULATORS_FIELDS
    ):
        allowed = f"dflash, as {' or '.join(_SPECULATORS_FIELDS)} is stated, or neither of them in a z-lab draft"
        raise fields.missing("speculators_model_type", allowed)
    if architecture in _OTHER_ARCHITECTURES:
        return _OTHER_ARCHITECTURES[architecture]
    raise fields.missing(
        "speculators_model_type", f"{' or '.join(_SPECULATORS_FAMILIES)} beside the architecture {architecture!r}"
    )


def implied_draft_architecture(raw: Mapping[str, Any]) -> str | None:
    """The architecture name of a draft whose config names none: files of the speculators library state their kind."""
    kind = raw.get("speculators_model_type")
    return _SPECULATORS_ARCHITECTURES[kind][0] if isinstance(kind, str) and kind in _SPECULATORS_ARCHITECTURES else None


def states_draft_fields(raw: Mapping[str, Any]) -> bool:
    """Whether a config states fields that only drafts have."""
    return any(raw.get(name) is not None for name in (*_BLOCK_FIELDS, *_SPECULATORS_FIELDS, "speculators_model_type"))


def require_family(raw: Mapping[str, Any], file: Path | str, wanted: DraftFamily) -> None:
    """Raise a `CheckpointError` that names both families unless `raw` is of the `wanted` one."""
    found = draft_family(raw, file)
    if found != wanted:
        architecture = only_architecture(Fields(raw, file), default=implied_draft_architecture(raw))
        raise CheckpointError(
            f"{file}: architectures: found {architecture!r}, a draft of the family {FAMILY_TITLES[found]}, "
            f"allowed {FAMILY_TITLES[wanted]}"
        )


def only_architecture(fields: Fields, *, default: str | None = None) -> str:
    """The single name in `architectures`, or `default` where a file may leave it out; every other number of names is a
    `CheckpointError`.
    """
    if default is not None and not fields.has("architectures"):
        return default
    names = fields.string_list("architectures")
    if len(names) != 1:
        raise fields.error("architectures", list(names), "a list of exactly one name")
    return names[0]


def _speculators_family(fields: Fields, architecture: str) -> DraftFamily:
    kind = fields.string("speculators_model_type", allowed=tuple(_SPECULATORS_FAMILIES))
    if architecture not in _SPECULATORS_ARCHITECTURES[kind]:
        allowed = f"{' or '.join(_SPECULATORS_ARCHITECTURES[kind])} beside speculators_model_type {kind!r}"
        raise fields.error("architectures", architecture, allowed)
    return _SPECULATORS_FAMILIES[kind]


def _block_places(fields: Fields) -> tuple[Fields, ...]:
    return (fields, fields.section("dflash_config"))


def refused_title(architecture: str) -> str | None:
    """What kind of draft this name belongs to, if it is one that is known and not supported."""
    return next((title for marker, title in _REFUSED_MARKERS.items() if marker.lower() in architecture.lower()), None)


def _refuse_by_name(fields: Fields, architecture: str) -> None:
    title = refused_title(architecture)
    if title is not None:
        raise fields.error(
            "architectures", architecture, f"{', '.join(_KNOWN_ARCHITECTURES)}; {title} drafts are not supported"
        )
    for place in (fields, fields.section("transformer_layer_config")):
        model_type = place.string("model_type", default="")
        if model_type.startswith("deepseek_v4"):
            raise place.error(
                "model_type",
                model_type,
                f"the model type of a dense draft; DeepSeek-V4 drafts ({architecture!r}) are not supported",
            )
