"""The z-lab writer is the inverse of the reader, for every window and causality, and refuses all other drafts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dspark_jax.speculators_common.formats.draft_config import DraftConfig, LayerMask, SlotThresholds
from dspark_jax.speculators_common.formats.rope.config import RopeConfig
from dspark_jax.speculators_common.formats.zlab.reader import from_zlab
from dspark_jax.speculators_common.formats.zlab.writer import to_zlab
from tests.support import tiny_families
from tests.support.written_configs import CAUSAL_FULL, FULL, NON_CAUSAL, SLIDING, assert_read_back, refusal


def zlab(**changes: Any) -> DraftConfig:
    """A z-lab draft of two full layers."""
    return dataclasses.replace(from_zlab(tiny_families.zlab_config(), "draft/config.json"), **changes)


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, (FULL, FULL)),
        ({"causal": True}, (CAUSAL_FULL, CAUSAL_FULL)),
        ({"is_causal": False}, (FULL, FULL)),
        ({"use_swa": True, "swa_window_size": 6}, (NON_CAUSAL, NON_CAUSAL)),
        ({"use_swa": True, "swa_window_size": 6, "sliding_window": 64}, (NON_CAUSAL, NON_CAUSAL)),
        ({"use_swa": True, "sliding_window": 6, "causal": True}, (SLIDING, SLIDING)),
        ({"use_swa": False, "swa_window_size": 6}, (FULL, FULL)),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}, (SLIDING, FULL)),
        ({"layer_types": ["sliding_attention", "full_attention"], "swa_window_size": 6}, (SLIDING, FULL)),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6, "causal": True},
            (CAUSAL_FULL, SLIDING),
        ),
        (
            {
                "layer_types": ["full_attention", "sliding_attention"],
                "sliding_window": 6,
                "sliding_window_non_causal": True,
            },
            (FULL, NON_CAUSAL),
        ),
        ({"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 6}, (FULL, SLIDING)),
    ],
)
@pytest.mark.parametrize("location", ["top level", "dflash_config"])
def test_every_window_and_causality_of_a_zlab_draft_is_written_as_it_was_read(
    fields: dict[str, Any], layers: tuple[LayerMask, ...], location: str
) -> None:
    of_block = {"use_swa", "swa_window_size", "causal", "is_causal"}
    inside = {name: value for name, value in fields.items() if location == "dflash_config" and name in of_block}
    outside = {name: value for name, value in fields.items() if name not in inside}
    block = {**tiny_families.ZLAB_BLOCK, **inside}
    config = from_zlab(tiny_families.zlab_config(**outside, dflash_config=block), "draft/config.json")
    assert config.layers == layers
    fields_written = to_zlab(config)
    assert_read_back(config, fields_written, from_zlab)
    assert ("is_causal" in fields_written["dflash_config"]) is any(
        layer.causal != (layer.window is not None) for layer in layers
    ), "a field that not every reader knows is written only where it is needed"


def test_the_scales_and_caps_of_a_zlab_draft_are_written_only_where_they_do_something() -> None:
    config = zlab(embedding_scale=2.0, output_multiplier=0.5, final_logit_softcapping=30.0)
    assert_read_back(config, to_zlab(config), from_zlab)
    assert to_zlab(config)["dflash_config"] == {
        "target_layer_ids": [0, 1],
        "mask_token_id": config.mask_token_id,
        "input_embedding_scale": 2.0,
        "output_multiplier": 0.5,
        "final_logit_softcapping": 30.0,
    }
    assert to_zlab(zlab()).get("dflash_config", {}).keys() == {"target_layer_ids", "mask_token_id"}
    assert "num_target_layers" not in to_zlab(zlab(num_target_layers=None))
    assert to_zlab(zlab(), dtype="bfloat16") == {**to_zlab(zlab()), "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sample_from_anchor": True}, "sample_from_anchor: found True, allowed false: a fill-in block"),
        ({"markov_rank": 4, "markov_head_type": "gated"}, "markov_rank: found 4, allowed 0: the format has no heads"),
        ({"enable_confidence_head": True}, "enable_confidence_head: found True, allowed false"),
        ({"draft_vocab_size": 7}, "draft_vocab_size: found 7, allowed 13 (vocab_size): the format has no draft vocab"),
        (
            {"target_hidden_size": 9},
            "target_hidden_size: found 9, allowed 32 (hidden_size): the format knows one width",
        ),
        ({"stores_tables": True}, "embed_tokens: found 'in the draft', allowed the target's embedding and head"),
        ({"num_target_layers": 2}, "taps: found [1, 2], allowed taps below the last of the target's 2 layers"),
        (
            {"layers": (SLIDING, LayerMask(window=7, causal=True)), "window_origin": "query"},
            "sliding_window: found [6, 7], allowed one window for all sliding layers",
        ),
        ({"layers": (SLIDING, FULL)}, "sliding_window: found [6], allowed a window counted from each query slot"),
        (
            {"layers": (SLIDING, NON_CAUSAL), "window_origin": "query"},
            "is_causal: found [True, False], allowed the same for all layers, or true in sliding ones alone",
        ),
        (
            {"layers": (FULL, CAUSAL_FULL)},
            "is_causal: found [False, True], allowed the same for all layers, or true in",
        ),
        ({"max_position_embeddings": None}, "max_position_embeddings: found None, allowed an integer >= 1"),
        ({"thresholds": SlotThresholds(values=(0.5,))}, "thresholds: found [0.5], allowed None, as the format has no"),
        ({"k_eq_v": True}, "attention_k_eq_v: found True, allowed False, as the format has no such field"),
        (
            {"rope": RopeConfig(theta=1e4, rotary_dim=4)},
            "partial_rotary_factor: found 0.5, allowed 1.0: readers of the",
        ),
    ],
)
def test_what_a_zlab_file_has_no_words_for_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    assert refusal(to_zlab, zlab(**changes)).startswith(
        f"draft/config.json: cannot be written in the z-lab DFlash format: {said}"
    )
