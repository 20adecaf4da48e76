"""The text model of a multimodal checkpoint: its config, the names of its tensors, and the tensors to ignore."""

from __future__ import annotations

from collections.abc import Collection

from dspark_jax.speculators_common.formats.fields import Fields
from dspark_jax.speculators_common.formats.quantised import refuse_quantised

# Prefixes of the text model's tensors, newest layout first. A text-only checkpoint has the last one.
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
    """The fields of the text model: `text_config` of a multimodal config, otherwise `fields` itself.

    Raises `CheckpointError` if the file states quantised weights anywhere.
    """
    refuse_quantised(fields.raw, fields.file)
    return fields.section("text_config") if has_towers(fields) else fields


def has_towers(fields: Fields) -> bool:
    """Whether the config is multimodal: it describes other towers (vision, audio) beside the text model."""
    return fields.has("text_config")


def text_prefix(names: Collection[str]) -> str:
    """The prefix of the text model's tensors in a checkpoint with the tensors `names`."""
    found = (
        prefix
        for tensor in ("embed_tokens.weight", "norm.weight")  # a tied file may store the head instead of the embedding
        for prefix in TEXT_PREFIXES
        if f"{prefix}{tensor}" in names
    )
    return next(found, "model.")


def head_name(names: Collection[str]) -> str:
    """The name of the head's tensor in a checkpoint with the tensors `names`; `lm_head.weight` if it has none."""
    return next(
        (name for name in ("lm_head.weight", "language_model.lm_head.weight") if name in names), "lm_head.weight"
    )


def ignored_text_tensors(*, has_towers: bool, tied: bool) -> tuple[str, ...]:
    """Names of tensors to ignore: those of other towers, and the stored copy of a tied head."""
    towers = tuple(f"{prefix}{tower}.*" for prefix in ("model.", "") for tower in _TOWERS) if has_towers else ()
    return (*towers, *(("lm_head.weight", "language_model.lm_head.weight") if tied else ()))
