"""A target with recurrent state is refused with the reason, before anything else is read."""

from __future__ import annotations

import pytest

from dspark_jax.architectures.decoder.recurrent_state import has_recurrent_name, refuse_recurrent_state
from dspark_jax.architectures.registry import known_names, retrieve
from dspark_jax.speculators_common.errors import CheckpointError

REASON = "its layers keep a recurrent state, which cannot take back rejected drafts"


@pytest.mark.parametrize(
    "name",
    [
        "Qwen3NextForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "Mamba2ForCausalLM",
        "JambaForCausalLM",
        "FalconH1ForCausalLM",
        "Lfm2ForCausalLM",
    ],
)
def test_the_registry_says_why_a_recurrent_architecture_is_unknown(name):
    with pytest.raises(CheckpointError) as caught:
        retrieve(name)
    assert str(caught.value).startswith(f"unsupported architecture {name!r}: {REASON}; known: ")


def test_an_architecture_that_is_only_unknown_is_told_apart():
    with pytest.raises(
        CheckpointError, match=r"unknown architecture 'Qwen3MoForCausalLM' \(did you mean Qwen3MoeForCausalLM\?\)"
    ):
        retrieve("Qwen3MoForCausalLM")


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"model_type": "qwen3_next"}, "model_type: found 'qwen3_next', allowed a target without recurrent state"),
        ({"model_type": "falcon_h1"}, "model_type: found 'falcon_h1'"),
        ({"model_type": "jamba"}, "model_type: found 'jamba'"),
        ({"text_config": {"model_type": "qwen3_5_text"}}, "text_config.model_type: found 'qwen3_5_text'"),
        ({"architectures": ["BambaForCausalLM"]}, "architectures: found 'BambaForCausalLM'"),
        (
            {"layer_types": ["full_attention", "linear_attention"]},
            "layer_types: found 'linear_attention', allowed attention layers only",
        ),
        ({"text_config": {"layer_types": ["conv"]}}, "text_config.layer_types: found 'conv'"),
        ({"layers_block_type": ["attention", "mamba"]}, "layers_block_type: found 'mamba'"),
    ],
)
def test_configs_of_recurrent_targets_are_refused_by_field(raw, expected):
    with pytest.raises(CheckpointError) as caught:
        refuse_recurrent_state({"architectures": ["SomeForCausalLM"], **raw}, "config.json")
    assert f"config.json: {expected}" in str(caught.value)
    assert REASON in str(caught.value)


def test_supported_names_and_layer_kinds_are_not_taken_for_recurrent_ones():
    assert [name for name in known_names() if has_recurrent_name(name)] == []
    for model_type in ("llama", "qwen3", "qwen3_moe", "gemma3_text", "gemma4_unified", "minimax_m2"):
        refuse_recurrent_state(
            {"model_type": model_type, "layer_types": ["full_attention", "sliding_attention"]}, "config.json"
        )
