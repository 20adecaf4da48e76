"""Reading the `config.json` of a DeepSpec draft with Gemma4 layers.

The file also holds values of the target that say nothing about the draft: the sliding window, the rotary settings of
sliding layers, and the sharing of keys and values between layers.
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

# Fields of the target. The head sizes of the draft are read by name below.
_TARGET_FIELDS = (
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
    """Read the config of a DeepSpec draft with Gemma4 layers. `raw` is the content of `file`.

    Such a draft is anchor-first and uses all ids of the target vocabulary. Its layers are full and bidirectional unless
    `use_swa` or `causal` states otherwise. Heads have `global_head_dim` elements. With `attention_k_eq_v` there are
    `num_global_key_value_heads` key/value heads, otherwise `num_key_value_heads`. The stated `partial_rotary_factor` is
    that of the draft. `overrides` are values stated by the user. Raises `CheckpointError` for a missing field and for a
    value that the format does not allow.
    """
    fields = deepspec_fields(
        raw, file, GEMMA4_ARCHITECTURE, activation_name="hidden_activation", activation="gelu_pytorch_tanh"
    )
    network = fields.network
    network.ignore(*_TARGET_FIELDS)
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
    """Refuse parts of Gemma4 targets that drafts of this format do not have. Raises `CheckpointError`."""
    if network.boolean("enable_moe_block", default=False):
        raise network.error("enable_moe_block", True, "false: drafts with expert layers are not supported")
    per_layer = network.integer("hidden_size_per_layer_input", default=0)
    if per_layer != 0:
        raise network.error(
            "hidden_size_per_layer_input", per_layer, "0: drafts with inputs per layer are not supported"
        )
    _refuse_wide_layers(network, num_layers)


def _refuse_wide_layers(network: Fields, num_layers: int) -> None:
    """Refuse a config in which some of the `num_layers` draft layers have a double-wide MLP.

    With `use_double_wide_mlp` these are the last `num_kv_shared_layers` layers. That number is copied from the target.
    If it is at least `num_layers`, no layer of the draft is double-wide. Raises `CheckpointError`.
    """
    shared = network.integer("num_kv_shared_layers", minimum=0, default=0)
    if network.boolean("use_double_wide_mlp", default=False) and 0 < shared < num_layers:
        allowed = (
            f"false, or true beside num_kv_shared_layers (found {shared}) that is 0 or at least the "
            f"{num_layers} layers of the draft"
        )
        raise network.error("use_double_wide_mlp", True, f"{allowed}: wide layers are not supported")
