"""The rotation of configs that state only parts of it, and the usable length with a scaled rotation.

The tests cover targets and drafts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dspark_jax.architectures.registry import retrieve
from dspark_jax.speculators_common.errors import CheckpointError
from dspark_jax.speculators_common.formats.rope.config import RopeConfig

DATA = Path(__file__).parents[2] / "data"
LLAMA, QWEN3, MOE = "E_targets/llama_untied_llama3rope", "E_targets/qwen3_tied", "E_targets/qwen3_moe"
SPECULATORS, DEEPSPEC = "C_speculators/pruned_anchor_full_vanilla", "A_deepspec_qwen3/vanilla"
ZLAB: dict[str, Any] = {"architectures": ["DFlashDraftModel"], "dflash_config": {"target_layer_ids": [1, 3]}}
ZLAB |= dict.fromkeys(
    ("speculators_model_type", "speculators_config", "aux_hidden_state_layer_ids", "sample_from_anchor"), ...
)
ROPE_NAMES = ("rope_parameters", "rope_scaling", "rope_theta")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def parsed(folder: str, **changes: Any) -> Any:
    """The config without its rotation and with some fields replaced at any depth; `...` removes a field."""
    raw = json.loads((DATA / folder / "config.json").read_text())
    nested = raw.get("transformer_layer_config", raw)
    for name in ROPE_NAMES:
        nested.pop(name, None)
    for name, value in changes.items():
        place = nested if name in nested or name in ROPE_NAMES else raw
        place[name] = value
        if value is ...:
            del place[name]
    return retrieve(raw["architectures"][0]).parse_config(raw, "config.json", None)


@pytest.mark.parametrize("folder", [LLAMA, QWEN3, MOE, SPECULATORS])
@pytest.mark.parametrize("changes", [{}, {"rope_parameters": {"rope_type": "default"}}, {"rope_scaling": None}])
def test_a_file_without_theta_means_that_of_its_format_and_that_is_a_choice(folder: str, changes: dict[str, Any]):
    config = parsed(folder, **changes)
    assert config.rope == RopeConfig(theta=10000.0, rotary_dim=16)
    [choice] = [choice for choice in config.choices if choice.name == "rope_theta"]
    assert (choice.value, choice.reason) == ("10000.0", "the file does not say; default of the format")
    stated = parsed(folder, rope_theta=10000.0)
    assert stated == config
    assert all(choice.name != "rope_theta" for choice in stated.choices)


def test_a_zlab_draft_without_theta_has_that_of_qwen3() -> None:
    config = parsed(SPECULATORS, **ZLAB, markov_rank=0)
    assert (config.family, config.rope.theta) == ("zlab_dflash", 10000.0)
    assert [choice.name for choice in config.choices] == ["rope_theta"]


def test_a_deepspec_draft_must_state_its_theta() -> None:
    with pytest.raises(CheckpointError, match=r"rope_theta: missing, allowed a finite number > 1"):
        parsed(DEEPSPEC)


@pytest.mark.parametrize("scaling", [{"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4}])
def test_linear_scaled_llama_files_state_no_theta(scaling: dict[str, Any]) -> None:
    config = parsed(LLAMA, rope_scaling=scaling)
    assert config.rope == RopeConfig(theta=10000.0, rotary_dim=16, kind="linear", factor=4.0)
    assert config.max_position_embeddings == 512  # files differ in whether this is before or after the scaling


@pytest.mark.parametrize("folder", [LLAMA, QWEN3, MOE, SPECULATORS, DEEPSPEC])
@pytest.mark.parametrize(
    ("rope", "stated", "length"),
    [
        (YARN, 40960, 131072),
        (YARN, 262144, 262144),
        (YARN | {"factor": 2.5}, 40960, 81920),
        ({"rope_type": "yarn", "factor": 4.0}, 1024, 4096),
        ({"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 4096}, 4096, 16384),
        ({"rope_type": "linear", "factor": 8.0}, 131072, 131072),
        ({"rope_type": "default", "original_max_position_embeddings": 4096}, 512, 512),
        (
            {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            131072,
            131072,
        ),
    ],
)
def test_a_stretched_rotation_serves_factor_times_its_original_length(folder, rope, stated, length) -> None:
    config = parsed(folder, rope_parameters={"rope_theta": 1e6, **rope}, max_position_embeddings=stated)
    assert config.max_position_embeddings == length
    assert config.unknown_fields == ()


def test_a_length_beyond_int32_is_refused() -> None:
    rope = YARN | {"factor": 65536.0, "rope_theta": 1e4}
    with pytest.raises(CheckpointError, match=r"factor: found 65536\.0, allowed at most 2147483647 / 32768"):
        parsed(QWEN3, rope_parameters=rope)


def test_a_yarn_file_may_state_a_share_of_the_usual_attention_factor() -> None:
    """0.878 times 1.1386 is one: the model was trained without an attention factor."""
    share = 0.8782488562869419
    rope = parsed(QWEN3, rope_parameters=YARN | {"rope_theta": 1e6, "attn_factor": share}).rope
    assert rope.attention_factor == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("folder", "changes", "expected"),
    [
        (LLAMA, {"sliding_window": 4096}, "sliding_window: found 4096, allowed null: the family has no windows"),
        (LLAMA, {"layer_types": ["sliding_attention"] * 6, "sliding_window": 8}, "layer_types: found"),
        (LLAMA, {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 8}, "use_sliding_window: found"),
        (QWEN3, {"layer_types": ["sliding_attention"] * 6, "sliding_window": 8}, "use_sliding_window: found False"),
        (MOE, {"layer_types": ["sliding_attention"] * 6}, "layer_types: found"),
        (
            QWEN3,
            {
                "layer_types": ["sliding_attention"] * 6,
                "use_sliding_window": True,
                "sliding_window": 8,
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6},
                    "sliding_attention": {"rope_theta": 1e4},
                },
            },
            "rope_parameters: found",
        ),
        (
            "E_targets/gemma3_text",
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {}}, "rope_local_base_freq": 5e4},
            "rope_local_base_freq: found 50000.0, allowed 10000.0, as rope_parameters says",
        ),
    ],
)
def test_windows_and_rotations_that_a_target_cannot_have_are_refused(folder, changes, expected) -> None:
    with pytest.raises(CheckpointError) as caught:
        parsed(folder, **changes)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("folder", "changes"),
    [
        (LLAMA, {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}),
        (LLAMA, {"rope_interleaved": False, "is_llama_config": True, "temperature": 0.6, "qkv_bias": False}),
        (QWEN3, {"use_mrope": False, "use_qk_norm": True, "is_decoder": True}),
        (
            MOE,
            {
                "use_qk_norm": True,
                "qkv_bias": False,
                "max_window_layers": 28,
                "shared_expert_intermediate_size": 0,
                "sliding_window": None,
            },
        ),
        ("E_targets/gemma3_text", {"cache_implementation": "hybrid", "sliding_window_pattern": 6}),
        (SPECULATORS, {"is_decoder": False, "norm_topk_prob": True, "use_sliding_window": False, "use_qk_norm": True}),
    ],
)
def test_what_published_files_write_beside_it_changes_nothing(folder, changes) -> None:
    assert parsed(folder, **changes) == parsed(folder)
