"""DeepSpec configs give the same `DraftConfig` as the speculators configs of the same drafts.

Unlike there, the fields of the block have no defaults.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dspark_jax.speculators_common.errors import CheckpointError
from dspark_jax.speculators_common.formats.deepspec.reader import from_deepspec
from dspark_jax.speculators_common.formats.draft_config import DraftConfig, DraftOverrides, LayerMask
from dspark_jax.speculators_common.formats.rope.config import RopeConfig
from dspark_jax.speculators_common.formats.speculators.reader import from_speculators

DATA = Path(__file__).parents[2] / "data" / "A_deepspec_qwen3"
FULL = LayerMask(window=None, causal=False)


def stored(variant: str = "vanilla") -> dict[str, Any]:
    return json.loads((DATA / variant / "config.json").read_text())


def changed(**changes: Any) -> dict[str, Any]:
    """The config of a small draft (W 5, V 199, target of 6 layers) with `changes`; the value `...` removes a field."""
    return {name: value for name, value in (stored() | changes).items() if value is not ...}


def parsed(raw: dict[str, Any], **overrides: Any) -> DraftConfig:
    return from_deepspec(raw, "draft/config.json", DraftOverrides(**overrides) if overrides else None)


def refusal(raw: dict[str, Any], **overrides: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        parsed(raw, **overrides)
    assert str(caught.value).startswith("draft/config.json: ")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("variant", "head", "confidence", "taps"),
    [
        ("vanilla", "vanilla", "with_markov", (2, 3, 5)),
        ("vanilla_bf16disk", "vanilla", "with_markov", (2, 3, 5)),
        ("vanilla_plainconf", "vanilla", "plain", (0, 2, 4)),
        ("gated", "gated", "with_markov", (2, 3, 5)),
        ("gated_attnbias", "gated", "plain", (2, 3, 5)),
        ("rnn", "rnn", "with_markov", (2, 3, 5)),
        ("rank0_noconf", "none", "none", (2, 3, 5)),
        ("rank0_plainconf", "none", "plain", (2, 3, 5)),
    ],
)
def test_every_recorded_variant_parses_to_what_its_name_says(variant, head, confidence, taps):
    config = parsed(stored(variant))
    assert config == DraftConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        attention_bias=variant == "gated_attnbias",
        vocab_size=199,
        draft_vocab_size=199,
        target_hidden_size=64,
        taps=taps,
        block_size=5,
        sample_from_anchor=True,
        mask_token_id=198,
        markov_rank=0 if head == "none" else 8,
        markov_head_type=head,
        enable_confidence_head=confidence != "none",
        confidence_head_with_markov=confidence == "with_markov",
        layers=(FULL, FULL),
        rope=RopeConfig(theta=1e4, rotary_dim=16),
        max_position_embeddings=512,
        architecture="Qwen3DSparkModel",
        family="deepspec_qwen3",
    )
    assert (config.architecture, config.family, config.source) == (
        "Qwen3DSparkModel",
        "deepspec_qwen3",
        "draft/config.json",
    )
    assert (config.num_target_layers, config.max_drafts, config.choices, config.unknown_fields) == (6, 5, (), ())


GEOMETRY = (
    "attention_bias",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "vocab_size",
)


def speculators_twin(raw: dict[str, Any]) -> dict[str, Any]:
    """The config of the same draft in the speculators format.

    Tap ids are one larger, the sizes are nested, and layout and draft vocabulary are stated.
    """
    heads = (
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
        "block_size",
        "mask_token_id",
    )
    return {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "aux_hidden_state_layer_ids": [x + 1 for x in raw["target_layer_ids"]],
        "sample_from_anchor": True,
        "draft_vocab_size": raw["vocab_size"],
        "transformer_layer_config": {name: raw[name] for name in GEOMETRY},
        **{name: raw[name] for name in heads if name in raw},
    }


@pytest.mark.parametrize("variant", sorted(path.name for path in DATA.iterdir() if path.is_dir()))
def test_a_speculators_twin_gives_an_equal_config(variant):
    raw = stored(variant)
    twin = from_speculators(speculators_twin(raw), "twin/config.json")
    assert twin == parsed(raw)
    assert twin.family != parsed(raw).family
    shifted = speculators_twin(raw) | {
        "aux_hidden_state_layer_ids": raw["target_layer_ids"] if variant != "vanilla_plainconf" else [1, 2, 4]
    }
    assert from_speculators(shifted, "twin/config.json") != parsed(raw)


def test_nested_geometry_and_grouped_block_fields_give_an_equal_config():
    raw = stored()
    group = ("block_size", "mask_token_id", "target_layer_ids")
    rest = {name: value for name, value in raw.items() if name not in (*GEOMETRY, *group)}
    twin = rest | {
        "transformer_layer_config": {name: raw[name] for name in GEOMETRY},
        "dspark_config": {name: raw[name] for name in group},
    }
    assert parsed(twin) == parsed(raw)
    assert parsed(twin).unknown_fields == ()


def test_fields_of_old_writers_are_understood():
    old = changed(
        rope_parameters=...,
        rope_theta=1e4,
        rope_scaling=None,
        dtype=...,
        torch_dtype="float32",
        layer_types=...,
        attention_bias=...,
    )
    assert parsed(old) == parsed(stored())


def test_a_window_in_the_file_has_no_meaning():
    assert parsed(changed(sliding_window=4096, use_sliding_window=True)).layers == (FULL, FULL)
    assert parsed(changed(sliding_window=-1)) == parsed(stored())


def test_training_fields_are_not_needed_and_unknown_ones_are_listed():
    assert parsed(changed(num_anchors=...)) == parsed(stored())
    config = parsed(changed(novelty=3, other=None))
    assert config.unknown_fields == ("novelty",)
    assert config == parsed(stored())


def test_layout_and_rotary_width_can_be_stated_by_the_user():
    fill_in = parsed(stored(), sample_from_anchor=False)
    assert (fill_in.sample_from_anchor, fill_in.max_drafts) == (False, 4)
    partial = parsed(changed(partial_rotary_factor=0.25))
    assert partial.rope.rotary_dim == 16
    stated = parsed(changed(partial_rotary_factor=0.25), partial_rotary_factor=0.25)
    assert stated.rope.rotary_dim == 4
    recorded = [
        [(choice.name, choice.value, choice.flag) for choice in config.choices] for config in (fill_in, partial, stated)
    ]
    assert recorded == [
        [("sample_from_anchor", "false", "--sample-from-anchor/--no-sample-from-anchor")],
        [("partial_rotary_factor", "1.0", "--partial-rotary-factor")],
        [("partial_rotary_factor", "0.25", "--partial-rotary-factor")],
    ]


REQUIRED = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size "
    "num_target_layers"
    " rms_norm_eps hidden_act max_position_embeddings block_size mask_token_id target_layer_ids markov_rank "
    "markov_head_type"
    " enable_confidence_head confidence_head_with_markov"
)


@pytest.mark.parametrize("name", REQUIRED.split())
def test_the_format_has_no_defaults(name):
    assert f"{name}: missing, allowed " in refusal(changed(**{name: ...}))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"target_layer_ids": []},
            "target_layer_ids: found [], allowed a non-empty, strictly increasing list of ids from -1 to 4",
        ),
        ({"target_layer_ids": [1, 4, 2]}, "found [1, 4, 2], allowed a non-empty, strictly increasing list"),
        ({"target_layer_ids": [-2, 1]}, "found [-2, 1], allowed a non-empty, strictly increasing list of ids from -1"),
        (
            {"target_layer_ids": [1, 5]},
            "found [1, 5], allowed a non-empty, strictly increasing list of ids from -1 to 4 for a target of 6 layers",
        ),
        ({"target_layer_ids": [1, 6]}, "(-1 = embedding output, x = output of layer x, last layer excluded)"),
        ({"mask_token_id": 199}, "mask_token_id: found 199, allowed 0 <= id < 199 (vocab_size)"),
        ({"mask_token_id": -1}, "mask_token_id: found -1, allowed 0 <= id < 199 (vocab_size)"),
        ({"block_size": 0}, "block_size: found 0, allowed an integer >= 1"),
        ({"hidden_act": "gelu"}, "hidden_act: found 'gelu', allowed silu"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings: found True, allowed false"),
        (
            {"layer_types": ["full_attention"] * 3},
            "'full_attention', 'full_attention', 'full_attention'], allowed one entry for each of 2 layers",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "found ['full_attention', 'sliding_attention'], allowed a list of full_attention",
        ),
        ({"markov_rank": -1}, "markov_rank: found -1, allowed an integer >= 0 (markov_head_type is 'vanilla')"),
        (
            {"markov_head_type": "lstm"},
            "markov_head_type: found 'lstm', allowed vanilla, gated, rnn (markov_rank is 8)",
        ),
        (
            {"markov_rank": 0, "markov_head_type": ...},
            "confidence_head_with_markov: found True, allowed false when markov_rank is 0",
        ),
        ({"rope_parameters": ...}, "rope_parameters.rope_theta or rope_theta: missing"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "proportional"}},
            "rope_parameters.rope_type: found 'proportional', allowed default, linear",
        ),
        (
            {"rope_theta": 1e6},
            "rope_parameters.rope_theta: found 10000.0, but rope_theta is 1000000.0, allowed the same value",
        ),
        (
            {"sample_from_anchor": False},
            "sample_from_anchor: found False, allowed true: drafts of this format are anchor-first",
        ),
        ({"num_attention_heads": 5}, "num_key_value_heads: found 2, allowed a divisor of num_attention_heads 5"),
        (
            {"quantization": {"bits": 4}},
            "quantization: found {'bits': 4}, allowed no such field: quantised weights are not supported",
        ),
        (
            {"transformer_layer_config": {"head_dim": 32}},
            "head_dim: found 16, but transformer_layer_config.head_dim is 32, allowed the same value",
        ),
        (
            {"architectures": ["Gemma4DSparkModel"]},
            "architectures: found 'Gemma4DSparkModel', allowed Qwen3DSparkModel",
        ),
        (
            {"speculators_model_type": "dspark"},
            "speculators_model_type: found 'dspark', allowed no such field in a draft that is read as 'Qwen3DSpark",
        ),
        (
            {"model_type": "deepseek_v4"},
            "model_type: found 'deepseek_v4', allowed the model type of a dense draft; DeepSeek-V4 drafts",
        ),
    ],
)
def test_a_wrong_config_is_refused_by_field_value_and_rule(changes, expected):
    assert expected in refusal(changed(**changes))


def test_a_single_slot_cannot_be_fill_in():
    assert "block_size: found 1, allowed an integer >= 2 for the fill-in layout" in refusal(
        changed(block_size=1), sample_from_anchor=False
    )
    assert parsed(changed(block_size=1)).max_drafts == 1
