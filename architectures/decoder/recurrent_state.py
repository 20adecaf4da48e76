"""Targets with recurrent state, which speculative decoding must refuse.

Rejected drafts have been through the target. In attention layers they leave cache rows that nobody reads again; in a
recurrent state (linear attention, state-space and short-convolution layers) they stay, and the text would depend on the
draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark_jax.speculators_common.formats.fields import Fields

REASON = "its layers keep a recurrent state, which cannot take back rejected drafts"

_LAYER_KINDS = (
    "linear_attention",
    "lightning_attention",
    "mamba",
    "mamba2",
    "recurrent",
    "conv",
    "short_conv",
    "rwkv",
    "gated_deltanet",
    "kda",
)
# Parts of model types and architecture names, in lower case without punctuation.
_MARKERS = (
    *(
        "qwen3next",
        "qwen35",
        "kimilinear",
        "olmohybrid",
        "minimaxforcausallm",
        "minimaxtext01",
        "minimaxm1",
        "bailingmoelinear",
    ),
    *("mamba", "jamba", "zamba", "bamba", "falconh1", "granitemoehybrid", "nemotronh", "plamo2"),
    *("recurrentgemma", "rwkv", "retnet", "xlstm", "lfm2"),
)


def has_recurrent_name(name: str) -> bool:
    """Whether a model type or architecture name is one of a recurrent or hybrid family."""
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    return any(marker in plain for marker in _MARKERS)


def refuse_recurrent_state(raw: Mapping[str, Any], file: str) -> None:
    """Raise a `CheckpointError` if the target's config, or the text part of it, names a recurrent family or recurrent
    layers.
    """
    fields = Fields(raw, file)
    for place in (fields, fields.section("text_config")):
        for name in ("model_type", "architectures"):
            stated = place.raw.get(name)
            for value in stated if isinstance(stated, list) else [stated]:
                if isinstance(value, str) and has_recurrent_name(value):
                    raise place.error(name, value, f"a target without recurrent state: {REASON}")
        refuse_recurrent_layers(place)


def refuse_recurrent_layers(fields: Fields) -> None:
    """Raise a `CheckpointError` if a layer is of a recurrent kind."""
    for name in ("layer_types", "layers_block_type"):
        kinds = fields.raw.get(name)
        for kind in kinds if isinstance(kinds, list) else ():
            if kind in _LAYER_KINDS:
                raise fields.error(name, kind, f"attention layers only: {REASON}")
