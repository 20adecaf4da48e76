"""Target configs: layouts with the same meaning parse to equal configs, and unsupported ones are refused by field."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from dspark_jax.architectures.registry import retrieve
from dspark_jax.speculators_common.errors import CheckpointError
from dspark_jax.speculators_common.formats.rope.config import RopeConfig

FOLDERS = {
    "qwen3": "qwen3_tied",
    "qwen3_moe": "qwen3_moe",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text_12b_like",
    "e2b": "gemma4_text_e2b_like",
    "unified": "gemma4_unified_multimodal_layout",
}


@pytest.fixture(scope="module")
def configs(data_dir: Path) -> dict[str, dict[str, Any]]:
    return {
        name: json.loads((data_dir / "E_targets" / folder / "config.json").read_text())
        for name, folder in FOLDERS.items()
    }


def parsed(raw: dict[str, Any]) -> Any:
    return retrieve(raw["architectures"][0]).parse_config(raw, "config.json", None)


def changed(raw: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy of the config with some fields replaced; `...` removes a field."""
    return {name: value for name, value in (copy.deepcopy(raw) | changes).items() if value is not ...}


def test_gemma3_reads_the_rotations_of_old_files(configs):
    new = configs["gemma3"]
    old = changed(
        new,
        {
            "rope_parameters": ...,
            "rope_theta": 1e6,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "rope_local_base_freq": 10000.0,
        },
    )
    assert parsed(old) == parsed(new)
    assert parsed(changed(old, {"rope_local_base_freq": ..., "rope_theta": ...})) == parsed(new)
    assert parsed(changed(old, {"rope_scaling": None})).rope == RopeConfig(theta=1e6, rotary_dim=16)


def test_gemma3_layer_kinds_follow_the_pattern_of_old_files(configs):
    by_pattern = changed(
        configs["gemma3"], {"layer_types": ..., "_sliding_window_pattern": ..., "sliding_window_pattern": 3}
    )
    assert parsed(by_pattern).layer_windows == (8, 8, None, 8, 8, None)
    by_default = changed(configs["gemma3"], {"layer_types": ..., "_sliding_window_pattern": ...})
    assert parsed(by_default).layer_windows == (8, 8, 8, 8, 8, None)


def test_gemma3_sizes_that_published_multimodal_files_leave_out():
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    text["rope_scaling"] = {"factor": 8.0, "rope_type": "linear"}
    config = parsed(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": text,
            "vision_config": {"hidden_size": 1152},
        }
    )
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.vocab_size) == (
        8,
        4,
        256,
        262208,
    )
    assert (config.query_pre_attn_scalar, config.layer_windows[:6], config.tie_word_embeddings) == (
        256.0,
        (1024,) * 5 + (None,),
        True,
    )
    assert (config.rope, config.sliding_rope) == (
        RopeConfig(theta=1e6, rotary_dim=256, kind="linear", factor=8.0),
        RopeConfig(theta=1e4, rotary_dim=256),
    )
    assert config.has_towers


def test_gemma4_text_part_is_the_text_model(configs):
    unified = configs["unified"]
    alone = {**unified["text_config"], "architectures": ["Gemma4UnifiedForCausalLM"]}
    assert parsed(alone).has_towers is False
    assert parsed(unified).layers == parsed(alone).layers == parsed(configs["gemma4"]).layers


def test_gemma4_per_layer_inputs_have_a_default_only_in_text_files(configs):
    assert parsed(changed(configs["gemma4"], {"hidden_size_per_layer_input": ...})).per_layer_input_size == 256
    text = changed(configs["unified"]["text_config"], {"hidden_size_per_layer_input": ...})
    assert parsed({**configs["unified"], "text_config": text}).per_layer_input_size == 0


def test_gemma4_layers_share_caches_of_their_own_kind(configs):
    layers = parsed(changed(configs["e2b"], {"num_kv_shared_layers": 4})).layers
    assert [(layer.stores_kv, layer.cache_layer) for layer in layers] == [
        (True, 0),
        (True, 1),
        (False, 0),
        (False, 0),
        (False, 1),
        (False, 1),
    ]
    assert [layer.num_key_value_heads for layer in layers] == [2] * 6, (
        "the global number counts only where values are keys"
    )


def test_gemma4_wide_layers_are_those_that_share(configs):
    assert {
        layer.intermediate_size for layer in parsed(changed(configs["e2b"], {"num_kv_shared_layers": 0})).layers
    } == {48}
    assert {
        layer.intermediate_size for layer in parsed(changed(configs["e2b"], {"use_double_wide_mlp": False})).layers
    } == {48}


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_qwen3_moe_expert_count_has_two_names(configs, name):
    raw = changed(configs["qwen3_moe"], {"num_experts": ..., "num_local_experts": ..., name: 4})
    assert parsed(raw) == parsed(configs["qwen3_moe"])


def test_qwen3_moe_sparse_layers_follow_step_and_exceptions(configs):
    raw = changed(configs["qwen3_moe"], {"decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert parsed(raw).layer_is_sparse == (False, True, False, False, False, True)


def test_qwen3_moe_windows_hold_for_every_layer(configs):
    assert (
        parsed(changed(configs["qwen3_moe"], {"use_sliding_window": True, "sliding_window": 16})).layer_windows
        == (16,) * 6
    )
    assert parsed(changed(configs["qwen3_moe"], {"sliding_window": 16})).layer_windows == (None,) * 6


def test_qwen3_files_without_layer_kinds_say_where_windows_begin(configs):
    raw = changed(
        configs["qwen3"], {"layer_types": ..., "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 4}
    )
    assert parsed(raw).layer_windows == (None, None, None, None, 16, 16)
    assert parsed(changed(raw, {"use_sliding_window": False})).layer_windows == (None,) * 6


def test_heads_that_a_qwen3_file_leaves_out_are_those_of_the_format(configs):
    assert parsed(changed(configs["qwen3"], {"head_dim": ...})).head_dim == 128
    assert parsed(changed(configs["qwen3_moe"], {"head_dim": ...})).head_dim == 64 // 4


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gemma3", "gemma4", "e2b", "unified"])
def test_unknown_fields_are_listed(configs, name):
    raw = copy.deepcopy(configs[name])
    assert parsed(raw).unknown_fields == ()
    prefix = "text_config." if "text_config" in raw else ""
    raw.get("text_config", raw)["novelty"] = 3
    assert parsed(raw).unknown_fields == (f"{prefix}novelty",)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        (
            "gemma4",
            {"global_head_dim": 31},
            "global_head_dim: found 31, allowed a head whose rotary part is an even number >= 2, found 31",
        ),
        ("qwen3", {"num_key_value_heads": ...}, "num_key_value_heads: missing, allowed an integer >= 1"),
        ("qwen3_moe", {"num_key_value_heads": ...}, "num_key_value_heads: missing, allowed an integer >= 1"),
        (
            "qwen3",
            {"num_hidden_layers": 10**9},
            "num_hidden_layers: found 1000000000, allowed an integer >= 1 and <= 1024",
        ),
        ("qwen3", {"vocab_size": 2**31}, "vocab_size: found 2147483648, allowed an integer >= 1, within int32"),
        (
            "qwen3",
            {"rms_norm_eps": 1e-300},
            "rms_norm_eps: found 1e-300, allowed a finite number > 0 and <= 1, within the range of float32",
        ),
        ("qwen3", {"rms_norm_eps": 3}, "rms_norm_eps: found 3, allowed a finite number > 0 and <= 1"),
        (
            "qwen3_moe",
            {"num_local_experts": 10**9},
            "num_local_experts: found 1000000000, allowed an integer >= 1 and <= 65536",
        ),
        ("qwen3_moe", {"use_sliding_window": True}, "sliding_window: found None, allowed an integer >= 1"),
        (
            "qwen3",
            {"use_sliding_window": True, "layer_types": ..., "max_window_layers": 2},
            "sliding_window: found None, allowed an integer >= 1",
        ),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: found 50.0, allowed null"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention: found True, allowed false"),
        ("gemma3", {"hidden_activation": "silu"}, "hidden_activation: found 'silu', allowed gelu_pytorch_tanh"),
        (
            "gemma3",
            {"layer_types": ["sliding_attention"] * 5},
            "allowed 6 entries of full_attention or sliding_attention",
        ),
        ("gemma3", {"sliding_window": 0}, "sliding_window: found 0, allowed an integer >= 1"),
        ("gemma3", {"hidden_size": ...}, "hidden_size: missing"),
        (
            "gemma4",
            {"enable_moe_block": True},
            "enable_moe_block: found True, allowed false: layers with experts are not supported",
        ),
        ("gemma4", {"attention_bias": True}, "attention_bias: found True, allowed false"),
        (
            "gemma4",
            {"use_bidirectional_attention": "all"},
            "use_bidirectional_attention: found 'all', allowed null or 'vision'",
        ),
        (
            "gemma4",
            {"layer_types": ["full_attention"] * 5 + ["sliding_attention"]},
            "allowed full_attention as the last entry",
        ),
        (
            "gemma4",
            {"num_global_key_value_heads": 3},
            "num_global_key_value_heads: found 3, allowed a divisor of num_attention_heads 4",
        ),
        ("gemma4", {"num_kv_shared_layers": 6}, "num_kv_shared_layers: found 6, allowed an integer >= 0 and <= 5"),
        (
            "e2b",
            {"num_kv_shared_layers": 5},
            "num_kv_shared_layers: found 5, allowed a number that leaves a full_attention layer before layer 1",
        ),
        (
            "unified",
            {"tie_word_embeddings": False},
            "text_config.tie_word_embeddings: found True, but tie_word_embeddings is False",
        ),
        (
            "qwen3_moe",
            {"num_local_experts": ...},
            "num_experts: missing, allowed an integer >= 1, here or as num_local_experts",
        ),
        ("qwen3_moe", {"num_experts": 8}, "num_experts: found 8, but num_local_experts is 4"),
        ("qwen3_moe", {"num_experts_per_tok": 5}, "num_experts_per_tok: found 5, allowed an integer >= 1 and <= 4"),
        ("qwen3_moe", {"mlp_only_layers": [6]}, "mlp_only_layers: found 6, allowed layers 0..5"),
        (
            "qwen3",
            {"layer_types": ["linear_attention"] * 6},
            "layer_types: found 'linear_attention', allowed attention layers only: its layers keep a",
        ),
        (
            "qwen3_moe",
            {"layer_types": ["linear_attention"] * 6},
            "layer_types: found 'linear_attention', allowed attention layers only",
        ),
        ("gemma4", {"layer_types": ["mamba"] * 6}, "layer_types: found 'mamba', allowed attention layers only"),
    ],
)
def test_what_a_target_cannot_be_is_refused_by_field(configs, name, changes, expected):
    with pytest.raises(CheckpointError) as caught:
        parsed(changed(configs[name], changes))
    assert str(caught.value).startswith("config.json: ")
    assert expected in str(caught.value)
