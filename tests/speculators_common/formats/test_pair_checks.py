"""A draft that was made for another target is refused. One error lists every mismatch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dspark_jax.speculators_common.errors import PairError
from dspark_jax.speculators_common.formats.deepspec.reader import from_deepspec
from dspark_jax.speculators_common.formats.draft_config import DraftConfig
from dspark_jax.speculators_common.formats.pair_checks import check_pair
from dspark_jax.speculators_common.formats.speculators.reader import from_speculators

DATA = Path(__file__).parents[2] / "data"
TARGET: dict[str, Any] = {
    "hidden_size": 64,
    "vocab_size": 199,
    "num_layers": 6,
    "target_architecture": "Qwen3ForCausalLM",
    "target_file": "target/config.json",
}


def deepspec() -> DraftConfig:
    return from_deepspec(
        json.loads((DATA / "A_deepspec_qwen3" / "vanilla" / "config.json").read_text()), "draft/config.json"
    )


def speculators(**changes: Any) -> DraftConfig:
    return from_speculators(
        json.loads((DATA / "C_speculators" / "full_anchor_mixed_rnn" / "config.json").read_text()) | changes,
        "draft/config.json",
    )


def refusal(draft: DraftConfig, **changes: Any) -> str:
    with pytest.raises(PairError) as caught:
        check_pair(draft, **(TARGET | changes))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_target_that_a_draft_was_made_for_passes():
    check_pair(deepspec(), **TARGET)
    check_pair(speculators(), **TARGET)
    check_pair(speculators(aux_hidden_state_layer_ids=[0, 5]), **TARGET)


def test_the_live_target_counts_and_not_the_hidden_size_of_the_draft():
    draft = speculators(target_hidden_size=96)
    check_pair(draft, **(TARGET | {"hidden_size": 96}))
    assert "hidden size: the draft expects 96, the target has 64" in refusal(draft)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_size": 128}, ["hidden size: the draft expects 64, the target has 128"]),
        ({"vocab_size": 300}, ["vocabulary: the draft expects 199, the target has 300"]),
        (
            {"vocab_size": 198},
            [
                "vocabulary: the draft expects 199, the target has 198",
                "mask_token_id: found 198, allowed 0 <= id < 198",
            ],
        ),
        ({"num_layers": 7}, ["number of layers: the draft expects 6, the target has 7"]),
        (
            {"num_layers": 4},
            [
                "number of layers: the draft expects 6, the target has 4",
                "taps: found [5], allowed 0 <= x < 4",
                "taps [2, 3, 5]",
            ],
        ),
    ],
)
def test_each_disagreement_names_both_values(changes, expected):
    text = refusal(deepspec(), **changes)
    assert text.startswith("draft/config.json: does not fit the target target/config.json (Qwen3ForCausalLM): ")
    for part in expected:
        assert part in text
    assert text.count("; ") >= len(expected) - 1


def test_the_output_of_the_last_layer_is_refused_with_list_depth_and_convention():
    text = refusal(speculators(aux_hidden_state_layer_ids=[1, 6]))
    assert (
        "taps: found 6, allowed 0 <= x < 6 (files differ in taking the last layer's output before or after the final "
        "norm)" in text
    )
    assert "taps [1, 6] count the residual stream after x of the target's 6 layers (0 = embedding output)" in text


def test_a_tap_beyond_the_target_is_refused():
    assert "taps: found [7, 9], allowed 0 <= x < 6; taps [1, 7, 9] count" in refusal(
        speculators(aux_hidden_state_layer_ids=[1, 7, 9])
    )


def test_everything_wrong_is_in_one_message():
    text = refusal(dataclasses.replace(deepspec(), taps=(2, 9)), hidden_size=1, vocab_size=2, num_layers=3)
    for part in ("hidden size", "vocabulary", "number of layers", "taps", "mask_token_id"):
        assert f"{part}: " in text
