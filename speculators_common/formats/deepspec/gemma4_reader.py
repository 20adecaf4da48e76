"""`config.json` of a DeepSpec draft with Gemma4 layers -> `DraftConfig`.

Many fields of the target stay behind without meaning for the draft: its sliding window, its per-kind rotary settings
other than `full_attention`, its key/value sharing between layers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark_jax.speculators_common.formats.deepspec.names import GEMMA4_ARCHITECTURE, GEMMA4_FAMILY
from dspark_jax.speculators_common.formats.deepspec.reader import deepspec_config, deepspec_fields
from dspark_jax.speculators_common.formats.draft_config import DraftConfig, DraftOverrides
from dspark_jax.speculators_common.formats.draft_fields import read_geometry, read_rope
from dspark_jax.speculators_common.formats.fields import Fields
from dspark_jax.speculators_common.formats.layer_masks import FULL

_OF_THE_TARGET = (
    "head_dim",
    "moe_intermediate_size",
    "num_experts",
    "num_global_key_value_heads",
    "num_key_value_heads",
    "target_model_type",
    "target_text_model_type",
    "top_k_experts",
    "use_bidirectional_attention",
    "vocab_size_per_layer_input",
)


def from_deepspec_gemma4(
    raw: Mapping[str, Any], file: Path | str, overrides: DraftOverrides | None = None
) -> DraftConfig:
    """The draft that `raw`, the content of `file`, describes: anchor-first, every layer full and bidirectional, the
    whole vocabulary.

    Every layer has heads of `global_head_dim`; which key/value head count applies depends on `attention_k_eq_v`. The
    rotating share of the head that the file states is the draft's own. Raises `CheckpointError` for everything that the
    format does not allow.
    """
    fields = deepspec_fields(
        raw, file, GEMMA4_ARCHITECTURE, activation_name="hidden_activation", activation="gelu_pytorch_tanh"
    )
    network = fields.network
    network.ignore(*_OF_THE_TARGET)
    k_eq_v = network.boolean("attention_k_eq_v")
    kv_heads_name = "num_global_key_value_heads" if k_eq_v else "num_key_value_heads"
    if not network.has(kv_heads_name):
        raise network.missing(kv_heads_name, f"an integer >= 1, as attention_k_eq_v is {str(k_eq_v).lower()}")
    geometry = read_geometry(fields.top, fields.nested, kv_heads_name=kv_heads_name, head_dim_name="global_head_dim")
    _refuse_other_layers(network, geometry["num_hidden_layers"])
    rope, rope_choices = read_rope(
        network,
        head_dim=geometry["head_dim"],
        layer_types=(FULL,),
        overrides=overrides,
        head_dim_name="global_head_dim",
        kinds=("default", "proportional"),
        is_trained_factor=True,
    )
    softcap = network.number("final_logit_softcapping", above=0, default=None)
    return dataclasses.replace(
        deepspec_config(fields, geometry, rope, rope_choices, overrides, family=GEMMA4_FAMILY),
        style="gemma4",
        k_eq_v=k_eq_v,
        embedding_scale=math.sqrt(geometry["hidden_size"]),
        final_logit_softcapping=softcap,
    )


def _refuse_other_layers(network: Fields, num_layers: int) -> None:
    """Parts that some Gemma4 targets have and no draft of this format."""
    if network.boolean("enable_moe_block", default=False):
        raise network.error("enable_moe_block", True, "false: drafts with expert layers are not supported")
    per_layer = network.integer("hidden_size_per_layer_input", default=0)
    if per_layer != 0:
        raise network.error(
            "hidden_size_per_layer_input", per_layer, "0: drafts with inputs per layer are not supported"
        )
    _refuse_wide_layers(network, num_layers)


def _refuse_wide_layers(network: Fields, num_layers: int) -> None:
    """The last `num_kv_shared_layers` layers have a wide MLP, unless that is all of them: a target's count may exceed
    the draft's depth.
    """
    shared = network.integer("num_kv_shared_layers", minimum=0, default=0)
    if network.boolean("use_double_wide_mlp", default=False) and 0 < shared < num_layers:
        allowed = (
            f"false, or true beside num_kv_shared_layers (found {shared}) that is 0 or at least the "
            f"{num_layers} layers of the draft"
        )
        raise network.error("use_double_wide_mlp", True, f"{allowed}: wide layers are not supported")
