"""The `config.json` of the Llama family (Llama, SmolLM2) -> `DecoderConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark_jax.architectures.decoder.dense import DecoderConfig
from dspark_jax.architectures.decoder.fields import (
    read_decoder_geometry,
    require_full_layers,
    unknown_target_fields,
)
from dspark_jax.speculators_common.formats.fields import Fields


def parse_llama(raw: Mapping[str, Any], file: str, overrides: None = None) -> DecoderConfig:
    """The config in `raw`, the content of `file`. Raises `CheckpointError` for a config that is not supported."""
    fields = Fields(raw, file)
    geometry = read_decoder_geometry(fields)
    geometry["choices"] += require_full_layers(fields, geometry["num_hidden_layers"])
    mlp_bias = fields.boolean("mlp_bias", default=False)
    attention_bias = fields.boolean("attention_bias", default=False)
    return DecoderConfig(
        **geometry,
        use_qk_norm=False,
        attention_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=mlp_bias,
        layer_windows=(None,) * geometry["num_hidden_layers"],
        architecture="LlamaForCausalLM",
        family="llama",
        source=file,
        unknown_fields=unknown_target_fields(fields),
    )
