"""What a draft's file leaves open, and what one field says and another one overrules, is a choice with its reason."""

from __future__ import annotations

from typing import Any

import pytest

from dspark_jax.speculators_common.errors import CheckpointError
from dspark_jax.speculators_common.formats.draft_config import DraftConfig, LayerMask
from tests.support.changed_drafts import FULL, PLAIN, SLIDING, deepspec, gemma4, speculators, zlab
from tests.support.speculators_configs import NESTED, base, drafts, parsed

DEFAULT = "the file does not say; default of the format"
CAUSAL = LayerMask(window=8, causal=True)
WINDOW = LayerMask(window=8, causal=False)


def choices(config: DraftConfig) -> dict[str, tuple[str, str]]:
    assert len({choice.name for choice in config.choices}) == len(config.choices)
    return {choice.name: (choice.value, choice.reason) for choice in config.choices}


def test_each_default_of_a_speculators_draft_is_a_choice() -> None:
    names = {
        "block_size": "8",
        "draft_vocab_size": "32000",
        "markov_rank": "256",
        "markov_head_type": "vanilla",
        "enable_confidence_head": "true",
        "confidence_head_with_markov": "true",
    }
    fields: dict[str, Any] = {
        "transformer_layer_config__vocab_size": 50000,
        "speculators_config__proposal_methods": drafts(None),
    }
    assert choices(parsed(base(**fields, **dict.fromkeys(names, ...)))) == {
        name: (value, DEFAULT) for name, value in names.items()
    }
    for name, value in names.items():
        assert choices(parsed(base(**fields, **{name: ...}))) == {name: (value, DEFAULT)}


def test_a_default_without_influence_is_no_choice() -> None:
    open_heads = dict.fromkeys(("markov_head_type", "confidence_head_with_markov"), ...)
    assert choices(parsed(base(**open_heads, markov_rank=0, enable_confidence_head=False))) == {}


def test_the_block_size_of_a_zlab_draft_may_be_open() -> None:
    config = zlab(block_size=...)
    assert (config.block_size, choices(config)) == (16, {"block_size": ("16", DEFAULT)})
    assert choices(zlab(block_size=..., dflash_config={"block_size": 16})) == {}


def test_layer_types_may_be_open() -> None:
    for parse in (speculators, zlab):
        types = {"layer_types": ..., "use_sliding_window": ...}
        assert choices(parse(**types)) == {"layer_types": ("full_attention in every layer", DEFAULT)}
        assert choices(parse(layer_types=...)) == {}  # use_sliding_window is false
        fields = {
            "layer_types": ...,
            "use_sliding_window": True,
            "sliding_window": 8,
            "sliding_window_non_causal": True,
        }
        assert choices(parse(**fields, max_window_layers=1)) == {}
        open_start = parse(**fields, max_window_layers=...)
        assert choices(open_start) == {
            "max_window_layers": ("28", DEFAULT),
            "sliding_window": ("not used", "the file says 8, and no layer slides"),
            "sliding_window_non_causal": ("not used", "the file says true, and no layer slides"),
        }
        assert open_start.layers == (PLAIN, PLAIN)
    assert choices(deepspec(layer_types=...)) == {}  # the format has no other layers


def test_the_causality_of_sliding_layers_may_be_open() -> None:
    fields = {"layer_types": [SLIDING, FULL], "use_sliding_window": True, "sliding_window": 8}
    config = speculators(**fields, sliding_window_non_causal=...)
    assert (config.layers, choices(config)) == ((CAUSAL, PLAIN), {"sliding_window_non_causal": ("false", DEFAULT)})
    for stated in ({"sliding_window_non_causal": False}, {"causal": True}, {"dspark_config": {"is_causal": True}}):
        assert choices(speculators(**fields, **({"sliding_window_non_causal": ...} | stated))) == {}
    assert choices(zlab(**fields, sliding_window_non_causal=...)) == {}  # the format has no such field


@pytest.mark.parametrize("parse", [speculators, zlab])
@pytest.mark.parametrize(
    ("fields", "layers", "expected"),
    [
        (
            {"layer_types": [SLIDING, FULL], "use_sliding_window": False, "sliding_window": 8},
            (CAUSAL, PLAIN),
            {
                "layer_types": (
                    "sliding_attention in 1 of 2 layers",
                    "the file says use_sliding_window false too; layer_types decides",
                )
            },
        ),
        (
            {"layer_types": [SLIDING] * 2, "use_sliding_window": True, "use_swa": False, "swa_window_size": 8},
            (CAUSAL, CAUSAL),
            {
                "layer_types": (
                    "sliding_attention in every layer",
                    "the file says use_swa false too; layer_types decides",
                )
            },
        ),
        (
            {"layer_types": [FULL] * 2, "use_sliding_window": True, "max_window_layers": 1},
            (PLAIN, PLAIN),
            {
                "layer_types": (
                    "full_attention in every layer",
                    "the file says use_sliding_window true too; layer_types decides",
                )
            },
        ),
        ({"layer_types": [FULL] * 2, "use_sliding_window": True, "max_window_layers": 2}, (PLAIN, PLAIN), {}),
        ({"layer_types": [FULL] * 2, "use_sliding_window": False, "sliding_window": 8}, (PLAIN, PLAIN), {}),
        (
            {"layer_types": [FULL] * 2, "use_sliding_window": ..., "sliding_window": 8},
            (PLAIN, PLAIN),
            {"sliding_window": ("not used", "the file says 8, and no layer slides")},
        ),
        (
            {"use_swa": True, "swa_window_size": 8, "sliding_window": 64},
            (WINDOW, WINDOW),
            {"swa_window_size": ("8", "the file says sliding_window 64 too; swa_window_size decides beside use_swa")},
        ),
        ({"use_swa": True, "swa_window_size": 8, "sliding_window": 8}, (WINDOW, WINDOW), {}),
        (
            {
                "layer_types": [SLIDING, FULL],
                "use_sliding_window": True,
                "sliding_window": 8,
                "causal": True,
                "sliding_window_non_causal": True,
            },
            (CAUSAL, LayerMask(window=None, causal=True)),
            {
                "causal": (
                    "true in every layer",
                    "the file says sliding_window_non_causal true too; causal decides",
                )
            },
        ),
    ],
)
def test_a_field_that_another_one_overrules_is_named(
    parse: Any, fields: dict[str, Any], layers: tuple[LayerMask, ...], expected: dict[str, tuple[str, str]]
) -> None:
    config = parse(**fields)
    assert (config.layers, choices(config)) == (layers, expected)


@pytest.mark.parametrize("parse", [deepspec, gemma4])
def test_a_deepspec_draft_has_full_layers_whatever_it_copied_from_its_target(parse: Any) -> None:
    config = parse(use_sliding_window=True, max_window_layers=0, sliding_window=8)
    assert set(config.layers) == {PLAIN}
    reason = "the file says true, as copied from a target; the layers of this format are full"
    assert choices(config) == {"use_sliding_window": ("false", reason)}
    assert choices(parse(sliding_window=8)) == {}


@pytest.mark.parametrize("name", ["sliding_window_pattern", "_sliding_window_pattern"])
def test_a_pattern_of_sliding_layers_is_no_field_of_a_draft(name: str) -> None:
    for parse in (speculators, zlab, deepspec, gemma4):
        with pytest.raises(CheckpointError, match=f"{name}: found 6, allowed no such field: its name speaks of"):
            parse(**{name: 6})


def test_nested_fields_count_like_those_at_the_top_level() -> None:
    nested = {f"{NESTED}__layer_types": [SLIDING] * 2, f"{NESTED}__sliding_window": 8}
    config = parsed(base(**nested))
    assert "layer_types" in choices(config)
    assert config.layers == (CAUSAL, CAUSAL)
