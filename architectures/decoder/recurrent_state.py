"""Detect targets with recurrent state. Speculative decoding does not support them.

The target runs over the drafts before they are accepted or rejected. In an attention layer a rejected draft leaves
cache entries that are never visible again. In a layer with recurrent state (linear attention, state-space and
short-convolution layers) it changes the state for all later tokens, so the text would depend on the draft.
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
# Parts of the model types and architecture names of recurrent families, in lower case without punctuation.
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
    """Whether a model type or an architecture name belongs to a family with recurrent layers."""
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    return any(marker in plain for marker in _MARKERS)


def refuse_recurrent_state(raw: Mapping[str, Any], file: str) -> None:
    """Raise `CheckpointError` if a target's config, or its `text_config`, names a recurrent family or recurrent layers.

    `raw` is the content of `file`.
    """
    fields = Fields(raw, file)
    for section in (fields, fields.section("text_config")):
        for name in ("model_type", "architectures"):
            stated = section.raw.get(name)
            for value in stated if isinstance(stated, list) else [stated]:
                if isinstance(value, str) and has_recurrent_name(value):
                    raise section.error(name, value, f"a target without recurrent state: {REASON}")
        refuse_recurrent_layers(section)


def refuse_recurrent_layers(fields: Fields) -> None:
    """Raise `CheckpointError` if the config names a recurrent layer kind."""
    for name in ("layer_types", "layers_block_type"):
        kinds = fields.raw.get(name)
        for kind in kinds if isinstance(kinds, list) else ():
            if kind in _LAYER_KINDS:
                raise fields.error(name, kind, f"attention layers only: {REASON}")
