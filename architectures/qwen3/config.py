"""`config.json` of the dense Qwen3 line -> `DecoderConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark_jax.architectures.decoder.dense import DecoderConfig
from dspark_jax.architectures.decoder.fields import (
    read_decoder_geometry,
    read_layer_windows,
    unknown_target_fields,
)
from dspark_jax.speculators_common.formats.fields import Fields

_HEAD_DIM = 128  # of a file that does not say, whatever its hidden size


def parse_qwen3(raw: Mapping[str, Any], file: str, overrides: None = None) -> DecoderConfig:
    """The decoder that `raw`, the content of `file`, describes: RMSNorm on every query and key head."""
    fields = Fields(raw, file)
    geometry = read_decoder_geometry(fields, {"head_dim": _HEAD_DIM}, required=("num_key_value_heads",))
    layer_windows = read_layer_windows(fields, geometry["num_hidden_layers"])
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
