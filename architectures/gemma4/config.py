"""The `config.json` of Gemma 4, text-only or multimodal -> `Gemma4Config`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dspark_jax.architectures.decoder.fields import (
    DecoderSizes,
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
from dspark_jax.speculators_common.formats.fields import Fields, only_architecture
from dspark_jax.speculators_common.formats.rope.config import RopeConfig, RopeKind
from dspark_jax.speculators_common.formats.rope.fields import parse_rope, usable_length
from dspark_jax.speculators_common.formats.size_limits import MAX_SIZE

_VOCAB_SIZE = 262_144
# Defaults of fields that published files may omit.
_DEFAULTS = {
    "vocab_size": _VOCAB_SIZE,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
}
_GLOBAL_HEAD_DIM, _SLIDING_WINDOW, _PER_LAYER_INPUT = 512, 512, 256
_ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "proportional")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4LayerConfig:
    """The config fields that differ between the layers of one model."""

    window: int | None  # sliding window in positions; None: full attention
    head_dim: int  # hd
    num_key_value_heads: int  # K
    value_is_key: bool  # no value projection: values are the output of the key projection
    cache_layer: int  # index, among the layers that store keys and values, of the layer whose keys and values are read
    stores_kv: bool  # false: the layer reads the keys and values of an earlier layer of the same kind
    intermediate_size: int  # F


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Config:
    """The config of a Gemma 4 text model."""

    hidden_size: int  # H
    num_hidden_layers: int
    num_attention_heads: int  # N
    rms_norm_eps: float
    vocab_size: int  # V
    max_position_embeddings: int
    tie_word_embeddings: bool
    final_logit_softcapping: float | None
    rope: RopeConfig  # of the full-attention layers
    sliding_rope: RopeConfig
    per_layer_input_size: int  # P, width of a layer's own input (see `PerLayerInputs`); 0: there is none
    per_layer_vocab_size: int  # rows of the embedding of these inputs
    layers: tuple[Gemma4LayerConfig, ...]
    has_towers: bool  # whether the checkpoint also has vision or audio towers

    architecture: str = dataclasses.field(compare=False)
    family: str = dataclasses.field(compare=False)
    source: str = dataclasses.field(default="", compare=False)
    choices: tuple[Choice, ...] = dataclasses.field(default=(), compare=False)
    # Dotted paths of fields that the file states and no reader knows. They have no influence.
    unknown_fields: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    @property
    def storing_layers(self) -> tuple[Gemma4LayerConfig, ...]:
        """The layers that store keys and values of their own, in order."""
        return tuple(layer for layer in self.layers if layer.stores_kv)


def parse_gemma4(raw: Mapping[str, Any], file: str, overrides: None = None) -> Gemma4Config:
    """The text model's config in `raw`, the content of `file`.

    Raises `CheckpointError` for a config that is not supported.
    """
    top = Fields(raw, file)
    fields = text_fields(top)
    sizes = read_decoder_sizes(fields, _DEFAULTS)
    require_activation(fields, "gelu_pytorch_tanh", "hidden_activation", "hidden_act")
    _refuse(fields)
    global_head_dim = fields.integer("global_head_dim", minimum=2, maximum=MAX_SIZE, default=_GLOBAL_HEAD_DIM)
    rope = parse_rope(
        fields,
        head_dim=global_head_dim,
        head_dim_name="global_head_dim",
        layer_types=("full_attention",),
        kinds=_ROPE_KINDS,
    )
    sliding_rope = parse_rope(fields, head_dim=sizes["head_dim"], layer_types=("sliding_attention",), kinds=_ROPE_KINDS)
    layers, choices = _layers(fields, sizes, global_head_dim)
    return Gemma4Config(
        hidden_size=sizes["hidden_size"],
        num_hidden_layers=sizes["num_hidden_layers"],
        num_attention_heads=sizes["num_attention_heads"],
        rms_norm_eps=sizes["rms_norm_eps"],
        vocab_size=sizes["vocab_size"],
        max_position_embeddings=usable_length(sizes["max_position_embeddings"], rope, file),
        tie_word_embeddings=fields.joined(top).boolean("tie_word_embeddings", default=True),
        final_logit_softcapping=fields.number("final_logit_softcapping", above=0, default=None),
        rope=rope,
        sliding_rope=sliding_rope,
        per_layer_input_size=_per_layer_input_size(fields),
        per_layer_vocab_size=fields.integer("vocab_size_per_layer_input", minimum=1, default=_VOCAB_SIZE),
        layers=layers,
        has_towers=has_towers(top),
        architecture=only_architecture(top, default="Gemma4ForCausalLM"),
        family="gemma4",
        source=file,
        choices=choices,
        unknown_fields=unknown_target_fields(fields, top),
    )


def _refuse(fields: Fields) -> None:
    for name, meaning in {
        "enable_moe_block": "layers with experts are not supported",
        "attention_bias": "projections have no bias",
    }.items():
        if fields.boolean(name, default=False):
            raise fields.error(name, True, f"false: {meaning}")
    # Fields of expert layers. A file without such layers may still state them.
    fields.ignore("use_bidirectional_attention", "moe_intermediate_size", "num_experts", "top_k_experts")
    bidirectional = fields.raw.get("use_bidirectional_attention")
    if bidirectional not in (None, False, "vision"):
        raise fields.error(
            "use_bidirectional_attention", bidirectional, "null or 'vision': a target decodes text left to right"
        )


def _per_layer_input_size(fields: Fields) -> int:
    """The width of the layers' own inputs, 0 if there are none.

    If the field is missing, `gemma4_text` configs have a default, and `gemma4_unified_text` configs have no such
    inputs.
    """
    is_unified = fields.string("model_type", default="").startswith("gemma4_unified")
    return fields.integer(
        "hidden_size_per_layer_input", minimum=0, maximum=MAX_SIZE, default=0 if is_unified else _PER_LAYER_INPUT
    )


def _layers(
    fields: Fields, sizes: DecoderSizes, global_head_dim: int
) -> tuple[tuple[Gemma4LayerConfig, ...], tuple[Choice, ...]]:
    """The config of every layer, and the choices about windows. `sizes` has the head dimension and the key/value heads
    of sliding layers.
    """
    count, heads, sliding_kv_heads = (
        sizes["num_hidden_layers"],
        sizes["num_attention_heads"],
        sizes["num_key_value_heads"],
    )
    kinds = read_layer_kinds(fields, count, (*every_sixth_full(count)[:-1], "full_attention"))
    if kinds[-1] != "full_attention":
        raise fields.error("layer_types", list(kinds), "full_attention as the last entry")
    windows = read_windows(fields, kinds, _SLIDING_WINDOW)
    value_is_key = fields.boolean("attention_k_eq_v", default=False)
    global_kv_heads = fields.integer(
        "num_global_key_value_heads", minimum=1, maximum=MAX_SIZE, default=sliding_kv_heads
    )
    if heads % global_kv_heads:
        raise fields.error("num_global_key_value_heads", global_kv_heads, f"a divisor of num_attention_heads {heads}")
    first_shared = count - fields.integer("num_kv_shared_layers", minimum=0, maximum=count - 1, default=0)
    width = fields.integer("intermediate_size", minimum=1, maximum=MAX_SIZE)
    doubles_width = fields.boolean("use_double_wide_mlp", default=False)
    layers = []
    for layer, (kind, window) in enumerate(zip(kinds, windows, strict=True)):
        is_full = kind == "full_attention"
        layers.append(
            Gemma4LayerConfig(
                window=window,
                head_dim=global_head_dim if is_full else sizes["head_dim"],
                num_key_value_heads=global_kv_heads if is_full and value_is_key else sliding_kv_heads,
                value_is_key=is_full and value_is_key,
                cache_layer=layer if layer < first_shared else _last_of_kind(fields, kinds, kind, first_shared),
                stores_kv=layer < first_shared,
                intermediate_size=2 * width if doubles_width and layer >= first_shared else width,
            )
        )
    return tuple(layers), alternating_window_choices(fields, kinds)


def _last_of_kind(fields: Fields, kinds: tuple[str, ...], kind: str, end: int) -> int:
    """The last layer of this kind before layer `end`. Raises `CheckpointError` if there is none."""
    found = [layer for layer in range(end) if kinds[layer] == kind]
    if not found:
        shared = len(kinds) - end
        raise fields.error(
            "num_kv_shared_layers",
            shared,
            f"a number that leaves a {kind} layer before layer {end}, whose keys are shared (layer_types)",
        )
    return found[-1]
