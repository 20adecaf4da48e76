"""speculators configs with contradictory or unsupported values are refused with the name of the field."""

from __future__ import annotations

import pytest

from tests.support.speculators_configs import DRAFTS, NESTED, base, changed, drafts, refusal


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"aux_hidden_state_layer_ids": ...}, "aux_hidden_state_layer_ids: missing, allowed a list of integers"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids: found None, allowed a list of integers"),
        (
            {"aux_hidden_state_layer_ids": []},
            "aux_hidden_state_layer_ids: found [], allowed a non-empty, strictly increasing list",
        ),
        (
            {"aux_hidden_state_layer_ids": [1, 5, 3]},
            "found [1, 5, 3], allowed a non-empty, strictly increasing list of ids from 0",
        ),
        ({"aux_hidden_state_layer_ids": [1, 1]}, "found [1, 1], allowed a non-empty, strictly increasing list"),
        (
            {"aux_hidden_state_layer_ids": [-1, 3]},
            "found [-1, 3], allowed a non-empty, strictly increasing list of ids from 0",
        ),
        (
            {"aux_hidden_state_layer_ids": [1, 6], "num_target_layers": 6},
            "found [1, 6], allowed a non-empty, strictly increasing list of ids from 0 to 5 for a target of 6 layers "
            "(num_target_layers)",
        ),
        ({"mask_token_id": ...}, "mask_token_id: missing, allowed 0 <= id < 199 (vocab_size)"),
        ({"mask_token_id": None}, "mask_token_id: found None, allowed 0 <= id < 199 (vocab_size)"),
        ({"mask_token_id": -1}, "mask_token_id: found -1, allowed 0 <= id < 199 (vocab_size)"),
        ({"mask_token_id": 199}, "mask_token_id: found 199, allowed 0 <= id < 199 (vocab_size)"),
        ({"block_size": 0}, "block_size: found 0, allowed an integer >= 1"),
        (
            {"block_size": 1, "sample_from_anchor": False, "speculators_config": ...},
            "block_size: found 1, allowed an integer >= 2 for the fill-in layout",
        ),
        ({"sample_from_anchor": 1}, "sample_from_anchor: found 1, allowed true or false"),
        ({"draft_vocab_size": 0}, "draft_vocab_size: found 0, allowed an integer >= 1 (vocab_size is 199)"),
        ({"markov_rank": -1}, "markov_rank: found -1, allowed an integer >= 0 (markov_head_type is 'vanilla')"),
        (
            {"markov_head_type": "lstm"},
            "markov_head_type: found 'lstm', allowed vanilla, gated, rnn (markov_rank is 8)",
        ),
        ({"markov_rank": 0}, "confidence_head_with_markov: found True, allowed false when markov_rank is 0"),
        ({f"{NESTED}.hidden_act": "gelu"}, f"{NESTED}.hidden_act: found 'gelu', allowed silu"),
        (
            {f"{NESTED}.hidden_act": ..., f"{NESTED}.hidden_activation": "gelu_pytorch_tanh"},
            "hidden_activation: found 'gelu_pytorch_tanh', allowed silu",
        ),
        (
            {f"{NESTED}.num_key_value_heads": 3},
            "num_key_value_heads: found 3, allowed a divisor of num_attention_heads 4",
        ),
        ({f"{NESTED}.rms_norm_eps": 0}, "rms_norm_eps: found 0, allowed a finite number > 0"),
        (
            {f"{NESTED}.layer_types": ["full_attention"]},
            "layer_types: found ['full_attention'], allowed one entry for each of 2 layers",
        ),
        (
            {f"{NESTED}.layer_types": ["full_attention", "chunked"]},
            "found ['full_attention', 'chunked'], allowed a list of full_attention, sliding_attention",
        ),
        (
            {f"{NESTED}.layer_types": ["full_attention", "sliding_attention"]},
            f"{NESTED}.sliding_window: found None, allowed an integer >= 1, as layer_types ['full_attention', "
            "'sliding_attention'] has",
        ),
        (
            {f"{NESTED}.layer_types": ["sliding_attention"] * 2, f"{NESTED}.sliding_window": 0},
            "sliding_window: found 0, allowed an integer >= 1",
        ),
        (
            {f"{NESTED}.rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic"}},
            f"{NESTED}.rope_parameters.rope_type: found 'dynamic', allowed default",
        ),
        (
            {"hidden_size": 128},
            f"hidden_size: found 128, but {NESTED}.hidden_size is 64, allowed the same value at both places",
        ),
        ({"rope_theta": 5e5}, f"{NESTED}.rope_parameters.rope_theta: found 10000.0, but rope_theta is 500000.0"),
        ({"dspark_config.block_size": 6}, "block_size: found 5, but dspark_config.block_size is 6"),
        ({"dflash_config.mask_token_id": 6}, "mask_token_id: found 198, but dflash_config.mask_token_id is 6"),
        ({"torch_dtype": "bfloat16"}, "dtype: found 'float32', but torch_dtype is 'bfloat16'"),
        ({"speculators_config.algorithm": "dflash"}, "speculators_config.algorithm: found 'dflash', allowed dspark"),
        (
            {"speculators_config.proposal_methods": drafts(4)},
            f"{DRAFTS}: found 4, allowed 5, as block_size 5 and the anchor-first layout (sample_from_anchor true) "
            "imply",
        ),
        (
            {"sample_from_anchor": False},
            f"{DRAFTS}: found 5, allowed 4, as block_size 5 and the fill-in layout (sample_from_anchor false) imply",
        ),
        (
            {"sample_from_anchor": ..., "speculators_config.proposal_methods": drafts(6)},
            f"{DRAFTS}: found 6, allowed 5 (anchor-first layout), 4 (fill-in layout) or fewer, as block_size 5 implies",
        ),
        (
            {"quantization": {"bits": 4, "group_size": 64}},
            "quantization: found {'bits': 4, 'group_size': 64}, allowed no such field: quantised weights",
        ),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config.quant_method: found 'fp8', allowed no such field",
        ),
        ({NESTED: 3}, f"{NESTED}: found 3, allowed a JSON object"),
        ({NESTED: ...}, "num_attention_heads: missing, allowed an integer >= 1"),
    ],
)
def test_a_wrong_config_is_refused_by_field_value_and_rule(changes, expected):
    assert expected in refusal(changed(base(), changes))


REQUIRED_GEOMETRY = (
    "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps "
    "max_position_embeddings num_hidden_layers vocab_size"
)


@pytest.mark.parametrize("name", REQUIRED_GEOMETRY.split())
def test_every_missing_size_is_named_at_both_places(name):
    assert f"{name} or {NESTED}.{name}: missing, allowed " in refusal(base(**{f"{NESTED}__{name}": ...}))


def test_overrides_are_checked_too():
    assert "--partial-rotary-factor: found 1.5, allowed a number > 0 and <= 1" in refusal(
        base(), partial_rotary_factor=1.5
    )
    one_slot = base(block_size=1, speculators_config__proposal_methods=drafts(1))
    assert "block_size: found 1, allowed an integer >= 2 for the fill-in layout" in refusal(
        one_slot, sample_from_anchor=False
    )
    six = base(speculators_config__proposal_methods=drafts(6))
    assert f"{DRAFTS}: found 6, allowed 5 (anchor-first layout), 4" in refusal(six, sample_from_anchor=True)


@pytest.mark.parametrize("architecture", ["Qwen3DSparkModel", "Gemma4DSparkModel", "DsparkDrafter"])
def test_a_draft_of_another_format_is_refused_by_name(architecture):
    """z-lab and the speculators library share an architecture name, so the error names the missing type field."""
    of_no_library = {"speculators_config": ..., "aux_hidden_state_layer_ids": ...}
    names = "DSparkDraftModel, DSparkSpeculator, DFlashDraftModel, DFlashSpeculator"
    said = refusal(base(architectures=[architecture], speculators_model_type=..., **of_no_library))
    assert said.endswith(f"architectures: found {architecture!r}, allowed {names}")
    said = refusal(base(architectures=["DFlashDraftModel"], speculators_model_type=..., **of_no_library))
    assert said.endswith("speculators_model_type: missing, allowed dflash beside the architecture 'DFlashDraftModel'")


@pytest.mark.parametrize("left_out", ["speculators_config", "aux_hidden_state_layer_ids"])
def test_a_speculators_dflash_draft_that_lost_its_type_is_not_taken_for_another_library_s(left_out):
    raw = base(architectures=["DFlashDraftModel"], speculators_model_type=..., **{left_out: ...})
    expected = "speculators_model_type: missing, allowed dflash beside the architecture 'DFlashDraftModel'"
    assert refusal(raw).endswith(expected)
