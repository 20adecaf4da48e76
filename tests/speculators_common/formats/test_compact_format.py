"""`dspark.json` is read and written back with the same content; wrong values are refused with the name of the field."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.speculators_common.errors import CheckpointError, PairError
from dspark_jax.speculators_common.formats.compact.format import (
    CompactDims,
    CompactSettings,
    check_config_json,
    check_target_id,
    compact_config,
    from_compact,
    tensor_shapes,
    to_compact,
    to_config_json,
)
from dspark_jax.speculators_common.formats.draft_config import (
    FINAL,
    DraftConfig,
    DraftOverrides,
    LayerMask,
    SlotThresholds,
)
from dspark_jax.speculators_common.formats.pair_checks import check_pair
from dspark_jax.speculators_common.formats.rope.config import RopeConfig
from tests.support.recorded_variants import COMPACT_VARIANTS

DATA = Path(__file__).parents[2] / "data" / "H_compact"
TARGET: dict[str, Any] = {
    "hidden_size": 64,
    "vocab_size": 199,
    "target_architecture": "Gemma3ForCausalLM",
    "target_file": "target/config.json",
}


def stored(variant: str = "markov_sts", file: str = "dspark.json") -> dict[str, Any]:
    return json.loads((DATA / variant / file).read_text())


def changed(**changes: Any) -> dict[str, Any]:
    """The `dspark.json` of a small draft, with `changes`: `a__b` is the field a.b, the value `...` removes it."""
    raw = copy.deepcopy(stored())
    for path, value in changes.items():
        *parents, name = path.split("__")
        section = raw
        for parent in parents:
            section = section[parent]
        if value is ...:
            section.pop(name, None)
        else:
            section[name] = value
    return raw


def parsed(raw: dict[str, Any]) -> DraftConfig:
    return from_compact(raw, "draft/dspark.json")


def refusal(raw: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        parsed(raw)
    assert str(caught.value).startswith("draft/dspark.json: ")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("variant", "head", "thresholds"),
    [("markov", "vanilla", None), ("rnn", "tanh_rnn", None), ("markov_sts", "vanilla", (0.0, 0.15, 0.6, 0.3, 0.7))],
)
def test_every_recorded_variant_parses_to_what_its_name_says(variant, head, thresholds):
    config = parsed(stored(variant))
    assert config == DraftConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        rms_norm_eps=1e-6,
        attention_bias=False,
        vocab_size=199,
        draft_vocab_size=199,
        target_hidden_size=64,
        taps=(3, 5, 7),
        block_size=5,
        sample_from_anchor=True,
        mask_token_id=None,
        markov_rank=8,
        markov_head_type=head,
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        layers=(LayerMask(), LayerMask()),
        rope=RopeConfig(theta=1.0, rotary_dim=0),
        max_position_embeddings=None,
        style="compact",
        thresholds=None if thresholds is None else SlotThresholds(values=thresholds),
        architecture="DsparkDrafter",
        family="compact",
    )
    assert (config.max_drafts, config.target_name, config.source) == (5, "tiny-target@64x199", "draft/dspark.json")
    assert (config.choices, config.unknown_fields, config.stores_tables) == ((), (), False)
    assert list(tensor_shapes(config)) == stored(variant)["param_names"]


@pytest.mark.parametrize("variant", COMPACT_VARIANTS)
def test_what_is_written_is_what_was_read(variant):
    raw = stored(variant)
    raw["config"].setdefault("seqHead", "markov")
    assert to_compact(parsed(raw)) == raw
    assert to_compact(parsed(raw).for_target(6)) == raw
    assert to_config_json(parsed(raw)) == stored(variant, "config.json")


def test_defaults_are_those_of_the_format():
    settings = CompactSettings()
    dims = CompactDims(hidden_size=2560, vocab_size=262144, rms_norm_eps=1e-6, num_layers=42)
    config = compact_config(settings, dims, target_id="some-model@2560x262144")
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim, config.intermediate_size) == (
        1024,
        5,
        128,
        2048,
    )
    assert config.taps == (21, 32, 42, FINAL)
    assert len(tensor_shapes(config)) == 56
    assert (
        len(tensor_shapes(compact_config(dataclasses.replace(settings, sequence_head="rnn"), dims, target_id="x")))
        == 59
    )
    raw = to_compact(config)
    raw["config"] = {}
    by_default = from_compact(raw, "dspark.json")
    assert by_default.for_target(42) == config
    assert {choice.name: choice.value for choice in by_default.choices} == {
        "gamma": "5",
        "dDraft": "1024",
        "nLayers": "5",
        "nHeads": "8",
        "markovRank": "256",
        "ffMult": "2",
        "tapLayers": "[20, 31, 41, 42]",
    }
    assert {choice.reason for choice in by_default.choices} == {"the file does not say; default of the format"}


def test_the_older_name_of_the_variant_and_a_missing_head_mean_the_same():
    assert parsed(changed(variant="dflash", config__seqHead=...)) == parsed(stored())


def test_unknown_fields_are_listed():
    assert parsed(changed(novelty=1, config__other=2)).unknown_fields == ("config.other", "novelty")


def test_the_tap_beyond_the_last_layer_is_the_state_after_the_final_norm():
    config = parsed(stored())
    assert config.for_target(6).taps == (3, 5, FINAL)
    assert config.for_target(6).for_target(6) == config.for_target(6)
    assert config.for_target(8).taps == (3, 5, 7)
    check_pair(config, num_layers=6, **TARGET)
    check_pair(parsed(changed(config__tapLayers=[0, 5, 6])), num_layers=6, **TARGET)
    check_pair(config, num_layers=7, **TARGET)
    with pytest.raises(
        PairError, match=r"taps: found \[7\], allowed 1 <= x <= 6; taps \[3, 5, 7\] count the residual stream"
    ):
        check_pair(config, num_layers=5, **TARGET)
    with pytest.raises(PairError, match="number of layers: the draft expects 6, the target has 8"):
        check_pair(config.for_target(6), num_layers=8, **TARGET)


def test_another_target_is_refused_by_both_values():
    config = parsed(stored())
    with pytest.raises(PairError, match="hidden size: the draft expects 64, the target has 32"):
        check_pair(config, num_layers=6, **TARGET | {"hidden_size": 32})
    with pytest.raises(PairError, match="vocabulary: the draft expects 199, the target has 200"):
        check_pair(config, num_layers=6, **TARGET | {"vocab_size": 200})
    check_target_id(config, "tiny-target@64x199")
    with pytest.raises(
        PairError, match="target_id: found 'tiny-target@64x199', allowed 'other@64x199', the id of the live target"
    ):
        check_target_id(config, "other@64x199")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"kind": "eagle"}, "kind: found 'eagle', allowed dspark-drafter"),
        ({"kind": ...}, "kind: missing, allowed dspark-drafter"),
        ({"variant": ...}, "variant: missing, allowed dspark; files without it hold an older, single-vector draft"),
        ({"variant": "eagle"}, "variant: found 'eagle', allowed dspark, dflash"),
        ({"version": 2}, "version: found 2, allowed 1"),
        ({"version": ...}, "version: missing, allowed an integer"),
        ({"target_id": ...}, "target_id: missing, allowed a string"),
        (
            {"target_id": "tiny-target@64x200"},
            "target_id: found 'tiny-target@64x200', allowed an id that ends in @64x199",
        ),
        ({"dims__eps": 0}, "dims.eps: found 0, allowed a finite number > 0"),
        ({"dims__hiddenSize": ...}, "dims.hiddenSize: missing, allowed an integer >= 1"),
        ({"dims": ...}, "dims.hiddenSize: missing"),
        ({"config__dDraft": 30}, "config.dDraft: found 30, allowed a multiple of nHeads 4"),
        ({"config__gamma": 0}, "config.gamma: found 0, allowed an integer >= 1"),
        ({"config__gamma": 257}, "config.gamma: found 257, allowed an integer >= 1 and <= 256"),
        ({"config__nLayers": 10**12}, "config.nLayers: found 1000000000000, allowed an integer >= 1 and <= 1024"),
        ({"config__nLayers": 0}, "config.nLayers: found 0, allowed an integer >= 1"),
        ({"config__markovRank": 0}, "config.markovRank: found 0, allowed an integer >= 1"),
        (
            {"config__tapLayers": []},
            "config.tapLayers: found [], allowed a non-empty, strictly increasing list of ids from 0",
        ),
        (
            {"config__tapLayers": [4, 2, 6]},
            "config.tapLayers: found [4, 2, 6], allowed a non-empty, strictly increasing list",
        ),
        ({"config__tapLayers": [-1, 2]}, "config.tapLayers: found [-1, 2], allowed"),
        ({"config__seqHead": "lstm"}, "config.seqHead: found 'lstm', allowed markov, rnn"),
        (
            {"config__sts__thresholds": [0.0, 0.5]},
            "config.sts.thresholds: found [0.0, 0.5], allowed one number for each of gamma 5 slots, found 2",
        ),
        (
            {"config__sts__thresholds": [0, 0, 0, 0, 1.5]},
            "config.sts.thresholds: found [0, 0, 0, 0, 1.5], allowed a list of numbers from 0 to 1",
        ),
        ({"config__sts__thresholds": ...}, "config.sts.thresholds: found None, allowed a list of numbers"),
        ({"config__sts": {}}, "config.sts.thresholds: found None, allowed a list of numbers"),
        ({"config__sts": [0.5]}, "config.sts: found [0.5], allowed a JSON object"),
        ({"param_names": ...}, "param_names: missing, allowed a list of strings"),
        ({"param_names": ["W_c"]}, "param_names: 'bb.0.attn_norm' missing, 'bb.0.q' missing"),
    ],
)
def test_a_wrong_description_is_refused_by_field_value_and_rule(changes, expected):
    assert expected in refusal(changed(**changes))


def test_surplus_and_repeated_names_are_refused():
    names = stored()["param_names"]
    expected = "param_names: 'rnn.wH' unexpected, 'W_c' twice; allowed the 29 tensors that config describes"
    assert expected in refusal(changed(param_names=[*names, "rnn.wH", "W_c"]))


def test_a_label_without_the_description_is_refused():
    with pytest.raises(CheckpointError, match=r"draft/config.json: dspark.json: missing beside it"):
        from_compact(stored("markov", "config.json"), "draft/config.json")


def test_nothing_can_be_stated_by_the_user_instead():
    with pytest.raises(CheckpointError, match="sample_from_anchor: found False stated by the user, allowed nothing"):
        from_compact(stored(), "dspark.json", DraftOverrides(sample_from_anchor=False))


@pytest.mark.parametrize(
    ("name", "value", "path"),
    [
        ("hidden_size", 48, "config.dDraft"),
        ("vocab_size", 200, "dims.vocabSize"),
        ("target_hidden_size", 1, "dims.hiddenSize"),
        ("target_id", "x", "target_id"),
    ],
)
def test_a_label_that_contradicts_the_description_is_refused(name, value, path):
    config_json = stored("markov_sts", "config.json")
    check_config_json(config_json, "draft/config.json", stored())
    with pytest.raises(
        CheckpointError, match=rf"draft/config.json: {name}: found {value!r}, allowed .*, the {path} of dspark.json"
    ):
        check_config_json(config_json | {name: value}, "draft/config.json", stored())


@st.composite
def _sizes(draw: st.DrawFn) -> tuple[dict[str, Any], list[float] | None, dict[str, Any]]:
    """Keyword arguments of `CompactSettings`, the thresholds, and keyword arguments of `CompactDims`."""
    heads, block, depth = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 9))
    chosen = {
        "block_size": block,
        "hidden_size": heads * draw(st.integers(1, 8)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "markov_rank": draw(st.integers(1, 8)),
        "feed_forward_multiple": draw(st.integers(1, 3)),
        "tap_layers": tuple(sorted(draw(st.sets(st.integers(0, depth), min_size=1, max_size=4)))),
        "sequence_head": draw(st.sampled_from(["markov", "rnn"])),
    }
    dims = {
        "hidden_size": draw(st.integers(1, 64)),
        "vocab_size": draw(st.integers(1, 300)),
        "rms_norm_eps": draw(st.floats(1e-12, 1e-2)),
    }
    return (
        chosen,
        draw(st.none() | st.lists(st.floats(0, 1), min_size=block, max_size=block)),
        {**dims, "num_layers": depth},
    )


@given(_sizes())
@settings(max_examples=60, deadline=None)
def test_every_record_survives_being_written_and_read(sizes):
    chosen, values, dims = sizes
    thresholds = None if values is None else SlotThresholds(values=tuple(values))
    config = compact_config(
        CompactSettings(**chosen, thresholds=thresholds),
        CompactDims(**dims),
        target_id=f"model@{dims['hidden_size']}x{dims['vocab_size']}",
    )
    text = json.dumps(to_compact(config))
    assert from_compact(json.loads(text), "dspark.json").for_target(dims["num_layers"]) == config
