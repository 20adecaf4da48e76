"""The `config.json` of Qwen3 mixture-of-experts targets -> `Qwen3MoeConfig`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dspark_jax.architectures.decoder.dense import DecoderConfig
from dspark_jax.architectures.decoder.fields import (
    read_decoder_geometry,
    read_layer_kinds,
    unknown_target_fields,
    unused_window,
)
from dspark_jax.architectures.decoder.recurrent_state import refuse_recurrent_layers
from dspark_jax.speculators_common.formats.choice import Choice
from dspark_jax.speculators_common.formats.fields import Fields, agreed
from dspark_jax.speculators_common.formats.size_limits import MAX_EXPERTS, MAX_SIZE

_HARMLESS_FIELDS = ("output_router_logits", "router_aux_loss_coef")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(DecoderConfig):
    """The config of a Qwen3 decoder with experts in some layers. `intermediate_size` is that of the dense layers."""

    num_experts: int  # E
    num_experts_per_tok: int  # k, the experts that the router selects for a token
    moe_intermediate_size: int  # of one expert
    norm_topk_prob: bool  # the weights of the selected experts are divided by their sum
    layer_is_sparse: tuple[bool, ...]  # whether the layer has experts


def parse_qwen3_moe(raw: Mapping[str, Any], file: str, overrides: None = None) -> Qwen3MoeConfig:
    """The config in `raw`, the content of `file`. Raises `CheckpointError` for a config that is not supported."""
    fields = Fields(raw, file)
    refuse_recurrent_layers(fields)
    geometry = read_decoder_geometry(fields, required=("num_key_value_heads",))
    fields.ignore(*_HARMLESS_FIELDS)
    attention_bias = fields.boolean("attention_bias", default=False)
    num_layers, num_experts = geometry["num_hidden_layers"], _num_experts(fields)
    window, window_choices = _window(fields, num_layers)
    geometry["choices"] += window_choices
    return Qwen3MoeConfig(
        **geometry,
        use_qk_norm=True,
        attention_bias=attention_bias,
        output_bias=attention_bias,
        layer_windows=(window,) * num_layers,
        num_experts=num_experts,
        num_experts_per_tok=fields.integer("num_experts_per_tok", minimum=1, maximum=num_experts),
        moe_intermediate_size=fields.integer("moe_intermediate_size", minimum=1, maximum=MAX_SIZE),
        norm_topk_prob=fields.boolean("norm_topk_prob", default=False),
        layer_is_sparse=_layer_is_sparse(fields, num_layers),
        architecture="Qwen3MoeForCausalLM",
        family="qwen3_moe",
        source=file,
        unknown_fields=unknown_target_fields(fields, neutral={"use_qk_norm": (True,)}),
    )


def _num_experts(fields: Fields) -> int:
    """The number of experts: `num_experts` in older files, `num_local_experts` in newer ones."""
    stated = [
        (name, fields.integer(name, minimum=1, maximum=MAX_EXPERTS))
        for name in ("num_experts", "num_local_experts")
        if fields.has(name)
    ]
    if not stated:
        raise fields.missing("num_experts", "an integer >= 1, here or as num_local_experts")
    return agreed(fields.file, stated)


def _window(fields: Fields, num_layers: int) -> tuple[int | None, tuple[Choice, ...]]:
    """The sliding window of all layers in positions, `None` for full attention, and the choice not to use one.

    `use_sliding_window` holds for every layer of this family. `layer_types`, if stated, must agree with it.
    `max_window_layers`, a field of dense Qwen3 configs, has no influence.
    """
    fields.ignore("max_window_layers")
    is_used = fields.boolean("use_sliding_window", default=False)
    only = "sliding_attention" if is_used else "full_attention"
    kinds = read_layer_kinds(fields, num_layers, (only,) * num_layers)
    if set(kinds) != {only}:
        raise fields.error("layer_types", list(kinds), f"{only} in every layer, as use_sliding_window says")
    if not is_used:
        fields.ignore("sliding_window")
        return None, () if fields.has("use_sliding_window") else unused_window(fields, kinds)
    return fields.integer("sliding_window", minimum=1), ()


def _layer_is_sparse(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    step = fields.integer("decoder_sparse_step", minimum=1, default=1)
    dense = fields.int_list("mlp_only_layers", default=())
    outside = [layer for layer in dense if not 0 <= layer < num_layers]
    if outside:
        raise fields.error("mlp_only_layers", outside[0], f"layers 0..{num_layers - 1} (num_hidden_layers)")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
