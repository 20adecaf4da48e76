"""A field that is not read is listed, or refused if its name says that it changes the network.

This holds at every depth of the config and for every family.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from dspark_jax.architectures.registry import retrieve
from dspark_jax.speculators_common.errors import CheckpointError
from dspark_jax.speculators_common.formats.fields import Fields
from dspark_jax.speculators_common.formats.unknown_fields import unknown_fields

DATA = Path(__file__).parents[2] / "data"
# A config of every family, and the objects in it that may hold further fields.
FAMILIES = {
    "speculators": ("C_speculators/pruned_anchor_full_vanilla", ("", "transformer_layer_config", "speculators_config")),
    "deepspec": ("A_deepspec_qwen3/vanilla", ("", "rope_parameters")),
    "deepspec gemma4": ("B_deepspec_gemma4/keqv_softcap_vanilla", ("", "rope_parameters.full_attention")),
    "compact": ("H_compact/markov", ("", "config", "dims")),
    "llama": ("E_targets/llama_untied_llama3rope", ("", "rope_parameters")),
    "qwen3": ("E_targets/qwen3_tied", ("", "rope_parameters")),
    "qwen3 moe": ("E_targets/qwen3_moe", ("",)),
    "gemma3": ("E_targets/gemma3_text", ("", "rope_parameters.sliding_attention")),
    "gemma4": ("E_targets/gemma4_text_12b_like", ("",)),
    "gemma4 towers": ("E_targets/gemma4_unified_multimodal_layout", ("", "text_config", "text_config.rope_parameters")),
}
SPEAKING: dict[str, Any] = {
    "attention_window": 64,
    "swa_layers": [0],
    "attention_chunk_size": 8192,
    "add_swa_attention_sink_bias": True,
    "causal_block": True,
    "prefix_mask": "full",
    "bidirectional_prefix": True,
    "rope_condense_ratio": 8,
    "no_rope_layers": [1],
    "rotary_base": 1e5,
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "logit_scale": 0.0625,
    "residual_alpha": 2.0,
    "attn_cap": 50.0,
    "softmax_temperature": 0.7,
    "normEps": 1e-5,
    "layer_norm_eps": 1e-5,
    "use_post_norm": True,
    "qkv_bias": True,
    "attention_multiplier": 1.0,
    "attn_scale": 1,
    "softmax_scale": 1.0,
    "no_bias": False,
    "disableBias": False,
    "remove_attention_bias": False,
}


def config_of(folder: str) -> tuple[dict[str, Any], Any]:
    path = DATA / folder
    file = next(file for file in (path / "dspark.json", path / "config.json") if file.is_file())
    raw = json.loads(file.read_text())
    return raw, retrieve(raw["architectures"][0] if "architectures" in raw else "DsparkDrafter")


def placed(raw: dict[str, Any], location: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A copy of `raw` with `fields` added to the object at the dotted path `location`."""
    raw = copy.deepcopy(raw)
    inner = raw
    for name in location.split(".") if location else ():
        inner = inner[name]
    inner |= fields
    return raw


@pytest.mark.parametrize(
    ("family", "location"), [(family, location) for family in FAMILIES for location in FAMILIES[family][1]]
)
def test_a_field_that_speaks_of_the_network_is_refused_by_name_at_every_depth(family, location):
    raw, entry = config_of(FAMILIES[family][0])
    for name, value in SPEAKING.items():
        stated = [({name: value}, name)]
        if not location.endswith("rope_parameters"):  # in these, an object holds the rotation of a layer type
            stated.append(({"extras": {"deep": [{name: value}]}}, f"extras.deep[0].{name}"))
        for fields, field in stated:
            with pytest.raises(CheckpointError) as caught:
                entry.parse_config(placed(raw, location, fields), "config.json", None)
            path = f"{location}.{field}" if location else field
            assert str(caught.value).startswith(f"config.json: {path}: found {value!r}, allowed no such field"), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_of_another_kind_is_listed_or_harmless(family):
    raw, entry = config_of(FAMILIES[family][0])
    for fields in ({"novelty": 3}, {"tokens": {"mask_token": "<|mask|>"}}, {"mode": "fast"}):
        assert entry.parse_config(placed(raw, "", fields), "config.json", None) is not None


def test_what_says_that_nothing_is_changed_is_no_unknown_field():
    neutral = {
        "is_decoder": False,
        "is_encoder_decoder": False,
        "qkv_bias": False,
        "use_mrope": False,
        "use_sliding_window": False,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1,
        "temperature": 1.0,
        "rope_scaling": {"factor": 1.0, "finetuned": True},
        "window_sizes": [],
    }
    assert unknown_fields(Fields(neutral, "config.json")) == ()


@pytest.mark.parametrize(
    "fields",
    [{"causal": False}, {"is_decoder": True}, {"use_rope": False}, {"rms_norm": False}, {"scale_attn_weights": False}],
)
def test_false_is_not_taken_for_off_where_it_may_mean_another_network(fields):
    [(name, value)] = fields.items()
    with pytest.raises(CheckpointError, match=f"config.json: {name}: found {value}, allowed no such field"):
        unknown_fields(Fields(fields, "config.json"))
