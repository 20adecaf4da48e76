"""speculators DSpark configs, flat and nested, are parsed into one `DraftConfig`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark_jax.speculators_common.formats.draft_config import DraftConfig, LayerMask
from dspark_jax.speculators_common.formats.rope.config import RopeConfig
from dspark_jax.speculators_common.formats.speculators.reader import from_speculators
from tests.support.speculators_configs import DATA, NESTED, base, changed, drafts, parsed, stored

DEMO = Path(__file__).parents[3] / "models" / "smollm2-135m-dspark" / "config.json"
FULL = LayerMask(window=None, causal=False)
CAUSAL = LayerMask(window=6, causal=True)
NON_CAUSAL = LayerMask(window=6, causal=False)
LAYOUT = ("sample_from_anchor", "--sample-from-anchor/--no-sample-from-anchor")


def test_a_stored_config_is_read_field_by_field():
    config = from_speculators(stored("pruned_anchor_full_vanilla"), DATA / "config.json")
    assert config == DraftConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        attention_bias=False,
        vocab_size=199,
        draft_vocab_size=61,
        target_hidden_size=64,
        taps=(1, 3, 5),
        block_size=5,
        sample_from_anchor=True,
        mask_token_id=198,
        markov_rank=8,
        markov_head_type="vanilla",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        layers=(FULL, FULL),
        window_origin="anchor",
        rope=RopeConfig(theta=1e4, rotary_dim=16),
        max_position_embeddings=512,
        architecture="DSparkDraftModel",
        family="speculators_dspark",
    )
    assert (config.architecture, config.family, config.source) == (
        "DSparkDraftModel",
        "speculators_dspark",
        str(DATA / "config.json"),
    )
    assert (config.target_name, config.target_architectures, config.num_target_layers) == (
        "../verifier",
        ("Qwen3ForCausalLM",),
        None,
    )
    assert (config.choices, config.unknown_fields) == ((), ())


@pytest.mark.parametrize(
    ("variant", "pruned", "anchor_first", "layers", "head", "confidence"),
    [
        ("pruned_anchor_full_vanilla", True, True, (FULL, FULL), "vanilla", "with_markov"),
        ("pruned_noanchor_full_vanilla", True, False, (FULL, FULL), "vanilla", "with_markov"),
        ("pruned_anchor_sliding_gated", True, True, (CAUSAL, CAUSAL), "gated", "with_markov"),
        ("full_noanchor_mixed_rnn", False, False, (CAUSAL, FULL), "rnn", "with_markov"),
        ("full_anchor_mixed_rnn", False, True, (FULL, CAUSAL), "rnn", "plain"),
        ("full_anchor_slidingnoncausal_vanilla", False, True, (NON_CAUSAL, NON_CAUSAL), "vanilla", "with_markov"),
        ("pruned_anchor_full_rank0", True, True, (FULL, FULL), "none", "plain"),
        ("pruned_noanchor_sliding_gated_noconf", True, False, (CAUSAL, CAUSAL), "gated", "none"),
        ("legacy_pruned_anchor_full_vanilla", True, True, (FULL, FULL), "vanilla", "with_markov"),
        ("legacy_full_anchor_mixed_gated", False, True, (FULL, CAUSAL), "gated", "with_markov"),
    ],
)
def test_every_recorded_variant_parses_to_what_its_name_says(variant, pruned, anchor_first, layers, head, confidence):
    config = parsed(stored(variant))
    assert (config.is_pruned, config.draft_vocab_size) == (pruned, 61 if pruned else 199)
    assert (config.sample_from_anchor, config.max_drafts) == (anchor_first, 5 if anchor_first else 4)
    assert config.layers == layers
    assert (config.markov_head_type, config.markov_rank) == (head, 0 if head == "none" else 8)
    assert (config.enable_confidence_head, config.confidence_head_with_markov) == (
        confidence != "none",
        confidence == "with_markov",
    )
    assert (config.choices, config.unknown_fields) == ((), ())


def test_the_demo_draft_parses():
    config = from_speculators(json.loads(DEMO.read_text()), DEMO)
    assert (config.taps, config.block_size, config.max_drafts, config.draft_vocab_size) == (
        (3, 9, 16, 23, 29),
        6,
        6,
        12288,
    )
    assert config.rope == RopeConfig(theta=1e5, rotary_dim=64)
    assert config.target_name == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_a_released_sliding_fill_in_draft_of_a_gemma_target_parses():
    raw = json.loads((DATA.parent / "speculators_gemma4_31b" / "config.json").read_text())
    config = parsed(raw)
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (5376, 21504, 5)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (32, 16, 256)
    assert (config.vocab_size, config.draft_vocab_size, config.is_pruned) == (262144, 32000, True)
    assert config.rope == RopeConfig(theta=1e4, rotary_dim=256)
    assert config.layers == (LayerMask(window=2048, causal=True),) * 5
    assert (config.block_size, config.sample_from_anchor, config.max_drafts, config.mask_token_id) == (8, False, 7, 4)
    assert (config.taps, config.num_taps) == ((1, 17, 29, 47, 58), 5)
    assert (config.markov_rank, config.markov_head_type) == (256, "vanilla")
    assert (config.choices, config.unknown_fields) == ((), ())


def test_flat_and_nested_descriptions_of_one_draft_are_equal():
    nested = stored("full_anchor_mixed_rnn")
    layer = nested.pop(NESTED)
    flat = nested | layer
    grouped = {"aux_hidden_state_layer_ids", "mask_token_id", "block_size"}
    own_group = {k: v for k, v in flat.items() if k not in grouped} | {"dspark_config": {k: flat[k] for k in grouped}}
    old_names = changed(
        flat, {"rope_parameters": ..., "rope_theta": 1e4, "rope_scaling": None, "dtype": ..., "torch_dtype": "float32"}
    )
    repeated = nested | {NESTED: layer} | {k: v for k, v in layer.items() if k != "rope_parameters"}
    expected = parsed(stored("full_anchor_mixed_rnn"))
    for twin in (flat, own_group, old_names, repeated):
        assert parsed(twin) == expected
        assert parsed(twin).unknown_fields == ()
    assert parsed(changed(flat, {"sliding_window": 7})) != expected


def test_layer_count_and_vocabulary_of_the_nested_config_win():
    config = parsed(base(num_hidden_layers=30, vocab_size=200))
    assert (config.num_hidden_layers, config.vocab_size) == (2, 199)


@pytest.mark.parametrize(
    ("raw", "value", "choices"),
    [
        (base(sample_from_anchor=False, speculators_config__proposal_methods=drafts(4)), False, []),
        (base(sample_from_anchor=True, speculators_config__proposal_methods=drafts(None)), True, []),
        (base(sample_from_anchor=...), True, [("true", "speculative_tokens 5 of block_size 5")]),
        (base(sample_from_anchor=None), True, [("true", "speculative_tokens 5 of block_size 5")]),
        (
            base(sample_from_anchor=..., speculators_config__proposal_methods=drafts(4)),
            False,
            [("false", "speculative_tokens 4 of block_size 5")],
        ),
        (
            base(sample_from_anchor=..., speculators_config__proposal_methods=...),
            True,
            [("true", "default of the format")],
        ),
        (base(sample_from_anchor=..., speculators_config=...), True, [("true", "default of the format")]),
    ],
)
def test_the_layout_is_stated_or_implied_or_the_default_and_an_open_one_is_recorded(raw, value, choices):
    config = parsed(raw)
    assert config.sample_from_anchor is value
    assert [(choice.name, choice.flag) for choice in config.choices] == [LAYOUT] * len(choices)
    for choice, (stated, reason) in zip(config.choices, choices, strict=True):
        assert choice.value == stated
        assert reason in choice.reason


@pytest.mark.parametrize("override", [True, False])
@pytest.mark.parametrize("stated", [True, False, None])
def test_a_layout_stated_by_the_user_wins_and_is_recorded(stated, override):
    config = parsed(base(sample_from_anchor=stated), sample_from_anchor=override)
    assert config.sample_from_anchor is override
    assert config.max_drafts == (5 if override else 4)
    (choice,) = config.choices
    assert (choice.name, choice.flag) == LAYOUT
    assert choice.value == str(override).lower()
    assert ("the file says nothing" if stated is None else f"the file says {str(stated).lower()}") in choice.reason


@pytest.mark.parametrize(
    "location", [f"{NESTED}__partial_rotary_factor", f"{NESTED}__rope_parameters", "partial_rotary_factor"]
)
def test_the_whole_head_rotates_although_the_file_says_otherwise(location):
    value = {"rope_theta": 1e4, "partial_rotary_factor": 0.25} if location.endswith("rope_parameters") else 0.25
    config = parsed(base(**{location: value}))
    assert config.rope.rotary_dim == config.head_dim
    (choice,) = config.choices
    assert (choice.name, choice.value, choice.flag) == ("partial_rotary_factor", "1.0", "--partial-rotary-factor")
    assert "0.25" in choice.reason
    stated = parsed(base(**{location: value}), partial_rotary_factor=0.5)
    assert stated.rope.rotary_dim == 8
    assert [(choice.value, "the file says 0.25" in choice.reason) for choice in stated.choices] == [("0.5", True)]


def test_a_full_rotary_factor_leaves_nothing_to_choose():
    assert parsed(base(transformer_layer_config__partial_rotary_factor=1.0)).choices == ()


@pytest.mark.parametrize(
    ("variant", "changes", "layers"),
    [
        ("pruned_anchor_full_vanilla", {f"{NESTED}.layer_types": ...}, (FULL, FULL)),
        ("pruned_anchor_full_vanilla", {f"{NESTED}.sliding_window": 7}, (FULL, FULL)),
        ("pruned_anchor_full_vanilla", {f"{NESTED}.sliding_window": -1}, (FULL, FULL)),
        ("full_anchor_mixed_rnn", {"sliding_window_non_causal": True}, (FULL, NON_CAUSAL)),
        ("full_anchor_mixed_rnn", {"sliding_window_non_causal": ...}, (FULL, CAUSAL)),
        ("full_anchor_mixed_rnn", {"causal": True}, (LayerMask(window=None, causal=True), CAUSAL)),
        ("full_anchor_mixed_rnn", {"causal": False}, (FULL, NON_CAUSAL)),
        (
            "full_anchor_mixed_rnn",
            {"causal": True, "sliding_window_non_causal": True},
            (LayerMask(window=None, causal=True), CAUSAL),
        ),
    ],
)
def test_window_and_causality_are_a_matter_of_each_layer(variant, changes, layers):
    assert parsed(changed(stored(variant), changes)).layers == layers


def test_absent_draft_fields_take_the_defaults_of_the_format():
    names = (
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
        "draft_vocab_size",
        "block_size",
    )
    raw = base(
        **dict.fromkeys(names, ...),
        transformer_layer_config__vocab_size=50000,
        speculators_config__proposal_methods=drafts(8),
    )
    config = parsed(raw)
    assert (config.markov_rank, config.markov_head_type, config.draft_vocab_size, config.block_size) == (
        256,
        "vanilla",
        32000,
        8,
    )
    assert config.enable_confidence_head
    assert config.confidence_head_with_markov


def test_optional_fields_have_their_meaning():
    assert parsed(base(markov_head_type="Gated")).markov_head_type == "gated"
    assert parsed(base(target_hidden_size=96)).target_hidden_size == 96
    assert parsed(base(num_target_layers=6)).num_target_layers == 6
    assert parsed(base(speculators_config__verifier__name_or_path=None)).target_name is None
    assert parsed(base(aux_hidden_state_layer_ids=[0, 4])).taps == (0, 4)
    assert parsed(base(transformer_layer_config__attention_bias=True)).attention_bias
    assert not parsed(base(draft_vocab_size=256)).is_pruned  # a padded head
    disabled = parsed(base(enable_confidence_head=False, markov_rank=0))
    assert not disabled.confidence_head_with_markov


def test_unknown_fields_are_listed_by_path_and_do_not_matter():
    config = parsed(
        base(novelty=1, transformer_layer_config__novelty=[2], speculators_config__novelty={"x": 3}, empty=None)
    )
    assert sorted(config.unknown_fields) == ["novelty", "speculators_config.novelty", f"{NESTED}.novelty"]
    assert config == parsed(base())


def test_fewer_drafts_than_the_block_gives_are_what_a_round_should_have_and_say_nothing_of_the_layout():
    for stated in (True, False):
        config = parsed(base(sample_from_anchor=stated, speculators_config__proposal_methods=drafts(3)))
        assert (config.stated_drafts, config.sample_from_anchor) == (3, stated)
    open_layout = parsed(base(sample_from_anchor=..., speculators_config__proposal_methods=drafts(3)))
    assert (open_layout.stated_drafts, open_layout.sample_from_anchor) == (3, True)
    assert "default of the format" in open_layout.choices[0].reason
    assert parsed(base(speculators_config__proposal_methods=drafts(None))).stated_drafts is None
