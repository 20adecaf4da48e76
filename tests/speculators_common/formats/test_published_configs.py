"""Configs of published drafts are read correctly, and their recipes need tensors of the published sizes.

`docs/checkpoints.md` states the sources of the values, and which sizes are known to the byte.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from dspark_jax.architectures.registry import retrieve
from dspark_jax.speculators_common.errors import CheckpointError
from dspark_jax.speculators_common.formats.draft_config import DraftConfig

DATA = Path(__file__).parents[2] / "data"
TABLES = ("embed_tokens.weight", "lm_head.weight")
QWEN3_TARGETS = {  # hidden, feed-forward, heads, layers, taps of the draft in DeepSpec's counting
    "4b": (2560, 9728, 32, 36, [1, 9, 17, 25, 33]),
    "8b": (4096, 12288, 32, 36, [1, 9, 17, 25, 33]),
    "14b": (5120, 17408, 40, 40, [1, 10, 19, 28, 37]),
}


def _read(raw: dict[str, Any], *stored: str) -> tuple[DraftConfig, dict[str, tuple[int, ...]]]:
    """The config, and name and shape of every tensor. `stored` are the optional tensors that the file holds."""
    entry = retrieve(raw["architectures"][0])
    config = entry.parse_config(raw, "config.json", None)
    return config, {
        name: shape for recipe in entry.recipes(config, stored).values() for name, shape in recipe.tensors.items()
    }


def _elements(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for name, shape in shapes.items() if name not in ("d2t", "t2d"))


def _deepspec_qwen3(size: str, *, has_heads: bool) -> dict[str, Any]:
    """A config as DeepSpec writes it: the target's config, in which the fields of the draft are replaced."""
    hidden, width, heads, layers, taps = QWEN3_TARGETS[size]
    network = {
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    fixed = {
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
    }
    target = {
        **network,
        **fixed,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
    }
    block = {
        "num_hidden_layers": 5,
        "layer_types": ["full_attention"] * 5,
        "num_target_layers": layers,
        "block_size": 7,
        "num_anchors": 512,
    }
    block |= {
        "target_layer_ids": taps,
        "mask_token_id": 151669,
        "tie_word_embeddings": False,
        "enable_confidence_head": has_heads,
    }
    heads_of_draft: dict[str, Any] = {"markov_rank": 0}
    if has_heads:
        heads_of_draft = {"markov_rank": 256, "markov_head_type": "vanilla", "confidence_head_with_markov": True}
    return {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", **target, **block, **heads_of_draft}


@pytest.mark.parametrize("size", QWEN3_TARGETS)
def test_deepspec_drafts_of_qwen3(size: str) -> None:
    config, shapes = _read(_deepspec_qwen3(size, has_heads=True), *TABLES, "confidence_head.proj.bias")
    assert (config.family, config.block_size, config.max_drafts, config.mask_token_id) == (
        "deepspec_qwen3",
        7,
        7,
        151669,
    )
    assert config.taps == tuple(layer + 1 for layer in QWEN3_TARGETS[size][4])
    assert (config.choices, config.unknown_fields) == ((), ())
    assert shapes["markov_head.markov_w1.weight"] == shapes["markov_head.markov_w2.weight"] == (151936, 256)
    assert shapes["confidence_head.proj.weight"] == (1, config.hidden_size + 256)
    plain, plain_shapes = _read(_deepspec_qwen3(size, has_heads=False), *TABLES)
    assert (plain.markov_head_type, plain.enable_confidence_head, plain.max_drafts) == ("none", False, 7)
    assert shapes.keys() - plain_shapes.keys() == {
        name for name in shapes if name.startswith(("markov_head.", "confidence_head."))
    }


def test_deepspec_draft_of_gemma4_12b() -> None:
    raw = json.loads((DATA / "deepspec_gemma4_12b" / "config.json").read_text())
    config, shapes = _read(raw, *TABLES, "confidence_head.proj.bias")
    assert (config.family, config.k_eq_v, config.head_dim, config.num_key_value_heads) == (
        "deepspec_gemma4",
        True,
        512,
        1,
    )
    assert (config.taps, config.num_target_layers, config.final_logit_softcapping) == ((6, 18, 30, 42, 47), 48, 30.0)
    assert 2 * config.rope.rotating_pairs == 128  # a quarter of a head
    assert (config.choices, config.unknown_fields) == ((), ())
    assert len(shapes) == 74
    assert 2 * _elements(shapes) == 6_860_889_100
    header_bytes = 6_860_897_028 - 6_860_889_100  # the first is the size of the released file
    assert 74 * 60 < header_bytes < 74 * 160


def test_speculators_draft_of_gemma4_31b() -> None:
    raw = json.loads((DATA / "speculators_gemma4_31b" / "config.json").read_text())
    config, shapes = _read(raw, *TABLES, "d2t", "t2d", "confidence_head.proj.bias")
    assert (config.max_drafts, config.is_pruned, config.sample_from_anchor) == (7, True, False)
    stated = "4.20 B, 7.82 GiB"  # by the publisher, who rounds
    assert f"{_elements(shapes) / 1e9:.2f} B, {2 * _elements(shapes) / 2**30:.2f} GiB" == stated


def test_speculators_draft_of_glm_tells_its_layout_by_its_speculative_tokens() -> None:
    """This file is older than `sample_from_anchor`. Its authors and other engines run it as fill-in."""
    network = {
        "model_type": "qwen3",
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "num_hidden_layers": 5,
        "num_attention_heads": 64,
    }
    network |= {
        "num_key_value_heads": 64,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1048576,
        "vocab_size": 154880,
    }
    raw = {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "block_size": 8,
        "aux_hidden_state_layer_ids": [8, 23, 39, 55, 70],
        "mask_token_id": 154856,
        "draft_vocab_size": 154880,
        "markov_rank": 256,
        "max_anchors": 1024,
        "speculators_config": {
            "algorithm": "dspark",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
        },
        "transformer_layer_config": {**network, "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"}},
    }
    config, shapes = _read(raw, *TABLES, "confidence_head.proj.bias")
    assert (config.sample_from_anchor, config.max_drafts) == (False, 7)
    assert [(choice.name, choice.value, choice.flag) for choice in config.choices] == [
        ("sample_from_anchor", "false", "--sample-from-anchor/--no-sample-from-anchor"),
        ("markov_head_type", "vanilla", ""),
        ("enable_confidence_head", "true", ""),
        ("confidence_head_with_markov", "true", ""),
        ("layer_types", "full_attention in every layer", ""),
    ]
    assert config.unknown_fields == ()
    assert f"{_elements(shapes) / 1e9:.3f} B" == "3.807 B"


def test_flat_dflash_drafts_state_mask_and_taps_in_a_section_or_beside_it() -> None:
    network = {
        "hidden_act": "silu",
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
    }
    flat = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        **network,
    }
    sizes = {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 5,
        "num_target_layers": 64,
        "vocab_size": 248320,
    }
    section = {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]}
    config, _ = _read(
        {
            **flat,
            **sizes,
            "block_size": 16,
            "rope_theta": 10000000,
            "max_position_embeddings": 262144,
            "dflash_config": section,
        }
    )
    assert (config.family, config.max_drafts, config.taps) == ("zlab_dflash", 15, (2, 17, 32, 47, 62))
    # One published file states a mask token beyond the target's vocabulary. Its embedding does not exist.
    sizes = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 2,
        "num_target_layers": 36,
        "vocab_size": 155697,
    }
    beside = {"mask_token_id": 155697, "target_layer_ids": [24, 30, 31, 32, 34], "block_size": 8}
    with pytest.raises(CheckpointError, match=r"mask_token_id: found 155697, allowed 0 <= id < 155697 \(vocab_size\)"):
        _read({**flat, **sizes, **beside, "rope_theta": 1000000.0, "max_position_embeddings": 40960})
