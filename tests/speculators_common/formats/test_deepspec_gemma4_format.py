"""DeepSpec Gemma4 configs: which fields describe the draft and not the target, and which values are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from dspark_jax.speculators_common.errors import CheckpointError
from dspark_jax.speculators_common.formats.deepspec.gemma4_reader import from_deepspec_gemma4
from dspark_jax.speculators_common.formats.draft_config import DraftConfig, DraftOverrides, LayerMask
from dspark_jax.speculators_common.formats.rope.config import RopeConfig

DATA = Path(__file__).parents[2] / "data" / "B_deepspec_gemma4"
FULL = LayerMask(window=None, causal=False)


def stored(variant: str = "keqv_softcap_vanilla") -> dict[str, Any]:
    return json.loads((DATA / variant / "config.json").read_text())


def changed(**changes: Any) -> dict[str, Any]:
    """The config of a small draft (W 5, V 199, target of 6 layers, values equal keys), with `changes`.

    A change replaces a field; the value `...` removes it.
    """
    return {name: value for name, value in (stored() | changes).items() if value is not ...}


def parsed(raw: dict[str, Any], **overrides: Any) -> DraftConfig:
    return from_deepspec_gemma4(raw, "draft/config.json", DraftOverrides(**overrides) if overrides else None)


def refusal(raw: dict[str, Any], **overrides: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        parsed(raw, **overrides)
    assert str(caught.value).startswith("draft/config.json: ")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("variant", "k_eq_v", "kv_heads", "cap", "share", "taps"),
    [
        ("keqv_softcap_vanilla", True, 1, 30.0, 0.25, (2, 3, 5)),
        ("unified_keqv_softcap", True, 1, 30.0, 0.25, (2, 3, 5)),
        ("sepv_nosoftcap_plainconf", False, 2, None, 1.0, (0, 2, 4)),
    ],
)
def test_every_recorded_variant_parses_to_what_its_name_says(variant, k_eq_v, kv_heads, cap, share, taps):
    config = parsed(stored(variant))
    assert config == DraftConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=32,
        rms_norm_eps=1e-6,
        attention_bias=False,
        vocab_size=199,
        draft_vocab_size=199,
        target_hidden_size=64,
        taps=taps,
        block_size=5,
        sample_from_anchor=True,
        mask_token_id=198,
        markov_rank=8,
        markov_head_type="vanilla",
        enable_confidence_head=True,
        confidence_head_with_markov=variant != "sepv_nosoftcap_plainconf",
        layers=(FULL, FULL),
        rope=RopeConfig(theta=1e6, rotary_dim=32, kind="proportional", rotating_pairs=int(share * 32 // 2)),
        max_position_embeddings=512,
        style="gemma4",
        k_eq_v=k_eq_v,
        embedding_scale=8.0,
        final_logit_softcapping=cap,
        architecture="Gemma4DSparkModel",
        family="deepspec_gemma4",
    )
    assert (config.family, config.source, config.num_target_layers) == ("deepspec_gemma4", "draft/config.json", 6)
    assert (config.max_drafts, config.choices, config.unknown_fields) == (5, (), ())


def test_the_released_gemma4_12b_drafts_parse():
    """With the published sizes, with both heads and without heads (the DFlash baseline)."""
    sizes = {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 5,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "global_head_dim": 512,
        "num_global_key_value_heads": 1,
        "vocab_size": 262144,
        "num_target_layers": 48,
        "block_size": 7,
        "mask_token_id": 4,
        "layer_types": ["full_attention"] * 5,
        "target_layer_ids": [5, 17, 29, 41, 46],
        "markov_rank": 256,
    }
    config = parsed(changed(**sizes))
    assert (config.taps, config.max_drafts, config.num_key_value_heads, config.head_dim) == (
        (6, 18, 30, 42, 47),
        7,
        1,
        512,
    )
    assert config.embedding_scale == math.sqrt(3840)
    assert config.rope.rotating_pairs == 64
    no_heads = {
        "markov_rank": 0,
        "markov_head_type": ...,
        "enable_confidence_head": False,
        "confidence_head_with_markov": ...,
    }
    dflash = parsed(changed(**sizes | no_heads))
    assert (dflash.markov_head_type, dflash.enable_confidence_head, dflash.sample_from_anchor, dflash.max_drafts) == (
        "none",
        False,
        True,
        7,
    )


def test_nested_geometry_and_grouped_block_fields_give_an_equal_config():
    raw = stored()
    group = ("block_size", "mask_token_id", "target_layer_ids", "markov_rank")
    top = (
        "architectures",
        "num_target_layers",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
    )
    nested = {name: value for name, value in raw.items() if name not in (*group, *top)}
    twin = {name: raw[name] for name in top} | {
        "transformer_layer_config": nested,
        "dspark_config": {name: raw[name] for name in group},
    }
    assert parsed(twin) == parsed(raw)
    assert parsed(twin).unknown_fields == ()


def test_what_belongs_to_the_target_alone_changes_nothing():
    assert parsed(changed(head_dim=7, num_key_value_heads=3, sliding_window=-1, num_kv_shared_layers=20)) == parsed(
        stored()
    )
    assert parsed(changed(use_double_wide_mlp=True, num_experts=8, top_k_experts=2)) == parsed(stored())
    for shared in (2, 20):
        assert parsed(changed(use_double_wide_mlp=True, num_kv_shared_layers=shared)) == parsed(stored()), (
            "no layer would be wide"
        )
    for name in (
        "enable_moe_block",
        "hidden_size_per_layer_input",
        "num_kv_shared_layers",
        "use_double_wide_mlp",
        "layer_types",
    ):
        assert parsed(changed(**{name: ...})) == parsed(stored())
    assert parsed(changed(novelty=3)).unknown_fields == ("novelty",)


def test_layout_and_rotary_width_can_be_stated_by_the_user():
    assert parsed(stored(), sample_from_anchor=False).max_drafts == 4
    whole = parsed(stored(), partial_rotary_factor=1.0)
    assert whole.rope.rotating_pairs == 16
    assert [(choice.name, choice.value, choice.reason) for choice in whole.choices] == [
        ("partial_rotary_factor", "1.0", "stated by the user; the file says 0.25")
    ]


REQUIRED = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads global_head_dim num_global_key_value_heads "
    "attention_k_eq_v"
    " vocab_size num_target_layers rms_norm_eps hidden_activation max_position_embeddings block_size mask_token_id "
    "target_layer_ids markov_rank"
    " markov_head_type enable_confidence_head confidence_head_with_markov"
)


@pytest.mark.parametrize("name", REQUIRED.split())
def test_the_format_has_no_defaults(name):
    assert f"{name}: missing, allowed " in refusal(changed(**{name: ...}))


def test_separate_values_need_the_other_head_count():
    assert "num_key_value_heads: missing, allowed " in refusal(changed(attention_k_eq_v=False, num_key_value_heads=...))
    assert parsed(changed(attention_k_eq_v=False, num_global_key_value_heads=...)).num_key_value_heads == 2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation: found 'silu', allowed gelu_pytorch_tanh"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers: found 1000000000000, allowed an integer >= 1 and <= 1024"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings: found True, allowed false"),
        ({"enable_moe_block": True}, "enable_moe_block: found True, allowed false"),
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input: found 256, allowed 0"),
        (
            {"use_double_wide_mlp": True, "num_kv_shared_layers": 1},
            "use_double_wide_mlp: found True, allowed false, or true beside num_kv_shared_layers (found 1) that is 0 "
            "or at least the 2 layers",
        ),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers: found -1, allowed an integer >= 0"),
        (
            {"num_global_key_value_heads": 3},
            "num_global_key_value_heads: found 3, allowed a divisor of num_attention_heads 4",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "allowed a list of full_attention"),
        (
            {"layer_types": ["full_attention"]},
            "layer_types: found ['full_attention'], allowed one entry for each of 2 layers",
        ),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping: found 0, allowed a finite number > 0"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}},
            "rope_parameters: found ['sliding_attention'], allowed an entry for full",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "proportional"}}}, "rope_theta: missing"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1e6}}},
            "rope_parameters.full_attention.rope_type: found 'yarn', allowed default, proportional",
        ),
        ({"mask_token_id": 199}, "mask_token_id: found 199, allowed 0 <= id < 199 (vocab_size)"),
        (
            {"target_layer_ids": [1, 5]},
            "target_layer_ids: found [1, 5], allowed a non-empty, strictly increasing list of ids from -1 to 4",
        ),
        (
            {"markov_rank": 0, "markov_head_type": ...},
            "confidence_head_with_markov: found True, allowed false when markov_rank is 0",
        ),
        ({"markov_head_type": "tanh_rnn"}, "markov_head_type: found 'tanh_rnn', allowed vanilla, gated, rnn"),
        ({"sample_from_anchor": False}, "sample_from_anchor: found False, allowed true"),
        (
            {"quantization": {"bits": 4, "group_size": 64}},
            "quantization: found {'bits': 4, 'group_size': 64}, allowed no such field",
        ),
        ({"architectures": ["Qwen3DSparkModel"]}, "architectures: found 'Qwen3DSparkModel', allowed Gemma4DSparkModel"),
        ({"torch_dtype": "bfloat16"}, "dtype: found 'float32', but torch_dtype is 'bfloat16'"),
        (
            {"transformer_layer_config": {"global_head_dim": 64}},
            "global_head_dim: found 32, but transformer_layer_config.global_head_dim is 64",
        ),
    ],
)
def test_a_wrong_config_is_refused_by_field_value_and_rule(changes, expected):
    assert expected in refusal(changed(**changes))


def test_the_rotary_share_is_checked():
    assert "--partial-rotary-factor: found 1.5, allowed a number > 0 and <= 1" in refusal(
        stored(), partial_rotary_factor=1.5
    )
