"""z-lab DFlash configs: fill-in, fields in `dflash_config` or at the top level, taps and mask token without default."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from dspark_jax.speculators_common.errors import CheckpointError
from dspark_jax.speculators_common.formats.draft_config import DraftConfig, DraftOverrides, LayerMask
from dspark_jax.speculators_common.formats.rope.config import RopeConfig
from dspark_jax.speculators_common.formats.speculators.reader import from_speculators
from dspark_jax.speculators_common.formats.zlab.reader import from_zlab

NETWORK = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 199,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}
WRITTEN = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "tie_word_embeddings": True,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 2,
    "num_target_layers": 6,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 198, "target_layer_ids": [1, 3]},
    "dtype": "bfloat16",
    "transformers_version": "4.57.1",
    **NETWORK,
}
FULL = LayerMask(window=None, causal=False)


def changed(**changes: Any) -> dict[str, Any]:
    """The config of a small draft, with `changes`: `a__b` is the field a.b, the value `...` removes it."""
    raw: dict[str, Any] = copy.deepcopy(WRITTEN)
    for path, value in changes.items():
        *parents, name = path.split("__")
        section = raw[parents[0]] if parents else raw
        if value is ...:
            section.pop(name, None)
        else:
            section[name] = value
    return raw


def parsed(raw: dict[str, Any], **overrides: Any) -> DraftConfig:
    return from_zlab(raw, "draft/config.json", DraftOverrides(**overrides) if overrides else None)


def refusal(raw: dict[str, Any], **overrides: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        parsed(raw, **overrides)
    assert str(caught.value).startswith("draft/config.json: ")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_written_config_is_read_field_by_field():
    config = parsed(WRITTEN)
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
        draft_vocab_size=199,
        target_hidden_size=64,
        taps=(2, 4),
        block_size=8,
        sample_from_anchor=False,
        mask_token_id=198,
        markov_rank=0,
        markov_head_type="none",
        enable_confidence_head=False,
        confidence_head_with_markov=False,
        layers=(FULL, FULL),
        rope=RopeConfig(theta=1e4, rotary_dim=16),
        max_position_embeddings=512,
        architecture="DFlashDraftModel",
        family="zlab_dflash",
    )
    assert (config.max_drafts, config.num_target_layers, config.stores_tables) == (7, 6, False)
    assert (config.choices, config.unknown_fields) == ((), ())


def test_the_speculators_twin_is_an_equal_record():
    twin = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [2, 4],
        "block_size": 8,
        "mask_token_id": 198,
        "draft_vocab_size": 199,
        "transformer_layer_config": NETWORK,
    }
    config = from_speculators(twin, "twin/config.json")
    assert config == parsed(WRITTEN)
    assert (config.family, config.stores_tables) == ("speculators_dflash", True)


def test_block_values_may_lie_at_the_top_level():
    grouped = changed(block_size=..., dflash_config__block_size=8)
    flat = changed(dflash_config=..., mask_token_id=198, target_layer_ids=[1, 3])
    assert parsed(grouped) == parsed(flat) == parsed(WRITTEN)
    assert parsed(changed(dflash_config__block_size=8)) == parsed(WRITTEN)
    assert parsed(changed(block_size=...)).block_size == 16


def test_the_extras_are_read_where_they_lie():
    extras = {"input_embedding_scale": 8.0, "output_multiplier": 0.5, "final_logit_softcapping": 30.0}
    inside = parsed(changed(**{f"dflash_config__{name}": value for name, value in extras.items()}))
    assert (inside.embedding_scale, inside.output_multiplier, inside.final_logit_softcapping) == (8.0, 0.5, 30.0)
    assert parsed(changed(**extras)) == inside
    assert inside != parsed(WRITTEN)


def test_windows_are_counted_from_the_query_and_causality_can_be_stated_for_all_layers():
    sliding = changed(layer_types=["sliding_attention", "full_attention"], sliding_window=6)
    config = parsed(sliding)
    assert (config.layers, config.window_origin) == ((LayerMask(window=6, causal=True), FULL), "query")
    for causal in (True, False):
        section = dict(WRITTEN["dflash_config"], is_causal=causal)  # type: ignore[call-overload]
        stated = parsed(sliding | {"dflash_config": section})
        assert stated.layers == (LayerMask(window=6, causal=causal), LayerMask(window=None, causal=causal))


def test_the_layout_can_be_stated_by_the_user():
    anchor_first = parsed(WRITTEN, sample_from_anchor=True)
    assert (anchor_first.max_drafts, [choice.name for choice in anchor_first.choices]) == (8, ["sample_from_anchor"])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"dflash_config__target_layer_ids": ...},
            "dflash_config.target_layer_ids or target_layer_ids: missing, allowed a list of integers",
        ),
        (
            {"dflash_config__mask_token_id": ...},
            "dflash_config.mask_token_id or mask_token_id: missing, allowed 0 <= id < 199 (vocab_size)",
        ),
        ({"dflash_config__mask_token_id": 199}, "dflash_config.mask_token_id: found 199, allowed 0 <= id < 199"),
        (
            {"mask_token_id": 3},
            "dflash_config.mask_token_id: found 198, but mask_token_id is 3, allowed the same value at both places",
        ),
        ({"dflash_config__block_size": 16}, "dflash_config.block_size: found 16, but block_size is 8"),
        (
            {"dflash_config__target_layer_ids": [3, 1]},
            "target_layer_ids: found [3, 1], allowed a non-empty, strictly increasing list",
        ),
        (
            {"dflash_config__target_layer_ids": [1, 5]},
            "ids from -1 to 4 for a target of 6 layers (num_target_layers), counted as z-lab does",
        ),
        ({"block_size": 1}, "block_size: found 1, allowed an integer >= 2 for the fill-in layout"),
        (
            {"sample_from_anchor": True},
            "sample_from_anchor: found True, allowed false: drafts of this format are fill-in",
        ),
        ({"dflash_config__input_embedding_scale": 0}, "input_embedding_scale: found 0, allowed a finite number > 0"),
        (
            {"dflash_config__final_logit_softcapping": -1.0},
            "final_logit_softcapping: found -1.0, allowed a finite number > 0",
        ),
        (
            {"layer_types": ["sliding_attention", "full_attention"]},
            "sliding_window: found None, allowed an integer >= 1",
        ),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 0},
            "sliding_window: found 0, allowed an integer >= 1",
        ),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers: found 1000000000000, allowed an integer >= 1 and <= 1024"),
        ({"hidden_act": "gelu"}, "hidden_act: found 'gelu', allowed silu"),
        ({"head_dim": ...}, "head_dim: missing, allowed an integer >= 1"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: found {'bits': 4}, allowed no such field"),
        (
            {"architectures": ["DFlash2DraftModel"]},
            "architectures: found 'DFlash2DraftModel', allowed DFlashDraft",
        ),
        (
            {"speculators_model_type": "dflash"},
            "speculators_model_type: found 'dflash', allowed no such field in a draft that is read as "
            "'DFlashDraftModel'",
        ),
    ],
)
def test_a_wrong_config_is_refused_by_field_value_and_rule(changes, expected):
    assert expected in refusal(changed(**changes))
