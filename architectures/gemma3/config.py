"""The `config.json` of Gemma 3, text-only or multimodal -> `Gemma3Config`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dspark_jax.architectures.decoder.dense import DecoderConfig
from dspark_jax.architectures.decoder.fields import (
    alternating_window_choices,
    every_sixth_full,
    read_decoder_sizes,
    read_layer_kinds,
    read_windows,
    require_activation,
    unknown_target_fields,
)
from dspark_jax.architectures.decoder.text_part import has_towers, text_fields
from dspark_jax.speculators_common.formats.choice import Choice
from dspark_jax.speculators_common.formats.fields import Fields, agreed, only_architecture
from dspark_jax.speculators_common.formats.rope.config import RopeConfig
from dspark_jax.speculators_common.formats.rope.fields import parse_rope, theta_choice, usable_length
from dspark_jax.speculators_common.formats.size_limits import MAX_SIZE
from dspark_jax.speculators_common.formats.window_choices import layer_types_decide

# Defaults of fields that published multimodal files omit.
_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
}
_SLIDING_WINDOW = 4096
_THETA, _SLIDING_THETA = 1_000_000.0, 10_000.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3Config(DecoderConfig):
    """The config of a Gemma 3 text model. `rope` is the rotation of the full-attention layers."""

    sliding_rope: RopeConfig
    final_logit_softcapping: float | None
    has_towers: bool  # whether the checkpoint also has vision or audio towers


def parse_gemma3(raw: Mapping[str, Any], file: str, overrides: None = None) -> Gemma3Config:
    """The text model's config in `raw`, the content of `file`.

    Raises `CheckpointError` for a config that is not supported.
    """
    top = Fields(raw, file)
    fields = text_fields(top)
    sizes = read_decoder_sizes(fields, _DEFAULTS)
    require_activation(fields, "gelu_pytorch_tanh", "hidden_activation", "hidden_act")
    _refuse(fields)
    fields.ignore("cache_implementation")
    kinds, window_choices = _layer_kinds(fields, sizes["num_hidden_layers"])
    rope, sliding_rope = _rotations(fields, sizes["head_dim"])
    attention_bias = fields.boolean("attention_bias", default=False)
    sizes["max_position_embeddings"] = usable_length(sizes["max_position_embeddings"], rope, file)
    return Gemma3Config(
        **sizes,
        intermediate_size=fields.integer("intermediate_size", minimum=1, maximum=MAX_SIZE),
        tie_word_embeddings=fields.joined(top).boolean("tie_word_embeddings", default=True),
        rope=rope,
        sliding_rope=sliding_rope,
        use_qk_norm=True,
        attention_bias=attention_bias,
        output_bias=attention_bias,
        query_pre_attn_scalar=fields.number("query_pre_attn_scalar", above=0, default=256.0),
        final_logit_softcapping=fields.number("final_logit_softcapping", above=0, default=None),
        layer_windows=read_windows(fields, kinds, _SLIDING_WINDOW),
        has_towers=has_towers(top),
        architecture=only_architecture(top, default="Gemma3ForCausalLM"),
        family="gemma3",
        source=file,
        choices=(*theta_choice(fields, ("full_attention",), rope.theta), *window_choices),
        unknown_fields=unknown_target_fields(fields, top),
    )


def _refuse(fields: Fields) -> None:
    if fields.has("attn_logit_softcapping"):
        raise fields.error(
            "attn_logit_softcapping", fields.number("attn_logit_softcapping"), "null: Gemma 3 attention has no soft-cap"
        )
    if fields.boolean("use_bidirectional_attention", default=False):
        raise fields.error("use_bidirectional_attention", True, "false: a target decodes left to right")


def _layer_kinds(fields: Fields, num_layers: int) -> tuple[tuple[str, ...], tuple[Choice, ...]]:
    """The kind of every layer, and the choices about windows.

    `layer_types` decides. Older files state a pattern instead: every n-th layer is full. Where both are stated and say
    different things, that is a choice; but a `_sliding_window_pattern` beside `layer_types` says nothing, because
    transformers writes 6 there whatever the layers are. Raises `CheckpointError` for two patterns that differ, without
    `layer_types`.
    """
    names = ("sliding_window_pattern", "_sliding_window_pattern")
    stated = {name: fields.integer(name, minimum=1) for name in names if fields.has(name)}
    fields.ignore(*names)
    if fields.has("layer_types"):
        kinds = read_layer_kinds(fields, num_layers, ())
        name = "sliding_window_pattern"
        differs = name in stated and every_sixth_full(num_layers, stated[name]) != kinds
        choices = layer_types_decide(kinds, {name: stated[name]} if differs else {})
    else:
        pattern = agreed(fields.file, list(stated.items())) if stated else 6
        kinds, choices = read_layer_kinds(fields, num_layers, every_sixth_full(num_layers, pattern)), ()
    return kinds, (*choices, *alternating_window_choices(fields, kinds))


def _rotations(fields: Fields, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """The rotation of full layers and that of sliding layers.

    New files nest both in `rope_parameters`. In old files `rope_theta` and `rope_scaling` are those of full layers;
    sliding layers use `rope_local_base_freq` without scaling.
    """
    nested = fields.section("rope_parameters")
    if any(isinstance(value, Mapping) for value in nested.raw.values()):
        full, sliding = (
            parse_rope(fields, head_dim=head_dim, layer_types=(kind,), default_theta=theta)
            for kind, theta in (("full_attention", _THETA), ("sliding_attention", _SLIDING_THETA))
        )
        if fields.number("rope_local_base_freq", above=1, default=sliding.theta) != sliding.theta:
            raise fields.error(
                "rope_local_base_freq", fields.raw["rope_local_base_freq"], f"{sliding.theta}, as rope_parameters says"
            )
        return full, sliding
    sliding_theta = fields.number("rope_local_base_freq", above=1, default=_SLIDING_THETA)
    sliding = RopeConfig(theta=sliding_theta, rotary_dim=head_dim)
    return parse_rope(fields, head_dim=head_dim, default_theta=_THETA), sliding
