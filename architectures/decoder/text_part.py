"""The text model inside a multimodal checkpoint: where its config and its tensors are, and which tensors belong to the
other towers.
"""

from __future__ import annotations

from collections.abc import Collection

from dspark_jax.speculators_common.formats.fields import Fields
from dspark_jax.speculators_common.formats.quantised import refuse_quantised

# Newest layout first; a text-only checkpoint has the last one.
TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
_TOWERS = (
    "vision_tower",
    "vision_embedder",
    "embed_vision",
    "audio_tower",
    "audio_embedder",
    "embed_audio",
    "multi_modal_projector",
)


def text_fields(fields: Fields) -> Fields:
    """The fields of the text model: `text_config` of a multimodal config, else the whole file. Raises `CheckpointError`
    for quantised weights, wherever the file speaks of them.
    """
    refuse_quantised(fields.raw, fields.file)
    return fields.section("text_config") if has_towers(fields) else fields


def has_towers(fields: Fields) -> bool:
    """Whether this config describes other towers beside the text model."""
    return fields.has("text_config")


def text_prefix(names: Collection[str]) -> str:
    """What the names of the text tensors begin with."""
    found = (
        prefix
        for table in ("embed_tokens.weight", "norm.weight")  # a tied file may keep the head alone
        for prefix in TEXT_PREFIXES
        if f"{prefix}{table}" in names
    )
    return next(found, "model.")


def head_name(names: Collection[str]) -> str:
    """The name of an untied head."""
    return next(
        (name for name in ("lm_head.weight", "language_model.lm_head.weight") if name in names), "lm_head.weight"
    )


def other_tensors(*, has_towers: bool, tied: bool) -> tuple[str, ...]:
    """Names that may be present without use: the other towers, and the copy of a tied head."""
    towers = tuple(f"{prefix}{tower}.*" for prefix in ("model.", "") for tower in _TOWERS) if has_towers else ()
    return (*towers, *(("lm_head.weight", "language_model.lm_head.weight") if tied else ()))
