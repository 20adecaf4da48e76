"""The `config.json` of dense Qwen3 targets -> `DecoderConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark_jax.architectures.decoder.dense import DecoderConfig
from dspark_jax.architectures.decoder.fields import (
    DEFAULT_THETA,
    read_decoder_geometry,
    read_layer_windows,
    unknown_target_fields,
)
from dspark_jax.speculators_common.formats.fields import Fields
from dspark_jax.speculators_common.formats.rope.config import RopeConfig
from dspark_jax.speculators_common.formats.rope.fields import parse_rope

_HEAD_DIM = 128  # the default, independent of the hidden size


def parse_qwen3(raw: Mapping[str, Any], file: str, overrides: None = None) -> DecoderConfig:
    """The config in `raw`, the content of `file`. Raises `CheckpointError` for a config that is not supported."""
    fields = Fields(raw, file)
    geometry = read_decoder_geometry(fields, {"head_dim": _HEAD_DIM}, required=("num_key_value_heads",))
    layer_windows, window_choices = read_layer_windows(fields, geometry["num_hidden_layers"])
    geometry["choices"] += window_choices
    if any(layer_windows):
        _require_one_rotation(fields, geometry["rope"], geometry["head_dim"])
    attention_bias = fields.boolean("attention_bias", default=False)
    return DecoderConfig(
        **geometry,
        use_qk_norm=True,
        attention_bias=attention_bias,
        output_bias=attention_bias,
        layer_windows=layer_windows,
        architecture="Qwen3ForCausalLM",
        family="qwen3",
        source=file,
        unknown_fields=unknown_target_fields(fields, neutral={"use_qk_norm": (True,)}),
    )


def _require_one_rotation(fields: Fields, rope: RopeConfig, head_dim: int) -> None:
    """Raise `CheckpointError` if `rope_parameters` gives sliding layers another rotation than full ones."""
    sliding = parse_rope(
        fields, head_dim=head_dim, layer_types=("sliding_attention", "full_attention"), default_theta=DEFAULT_THETA
    )
    if sliding != rope:
        raise fields.error(
            "rope_parameters",
            fields.section("rope_parameters").raw,
            "the same rotation for sliding_attention and full_attention",
        )
