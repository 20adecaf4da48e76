"""speculators DFlash configs: the same file format as DSpark, without heads and fill-in by default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dspark_jax.speculators_common.errors import CheckpointError
from dspark_jax.speculators_common.formats.draft_config import DraftConfig
from dspark_jax.speculators_common.formats.speculators.reader import from_speculators

STORED = Path(__file__).parents[2] / "data" / "C_speculators" / "pruned_anchor_full_vanilla" / "config.json"


def drafts(count: int | None) -> dict[str, Any]:
    """A `speculators_config` that states this number of `speculative_tokens`."""
    method = {"proposal_type": "greedy"} | ({} if count is None else {"speculative_tokens": count})
    return {"algorithm": "dflash", "proposal_methods": [method]}


def dflash(**changes: Any) -> dict[str, Any]:
    """The config of a small pruned draft (W 5, V 199, Vd 61) without heads, with `changes`; `...` removes a field."""
    heads = (
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
        "sample_from_anchor",
    )
    own = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_config": drafts(None),
    }
    raw = json.loads(STORED.read_text()) | dict.fromkeys(heads, ...) | own | changes
    return {name: value for name, value in raw.items() if value is not ...}


def parsed(raw: dict[str, Any]) -> DraftConfig:
    return from_speculators(raw, "draft/config.json")


def refusal(raw: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        parsed(raw)
    assert str(caught.value).startswith("draft/config.json: ")
    return str(caught.value)


def test_dflash_drafts_have_no_heads_and_are_fill_in_by_default():
    config = parsed(dflash())
    assert (config.family, config.markov_head_type, config.markov_rank, config.enable_confidence_head) == (
        "speculators_dflash",
        "none",
        0,
        False,
    )
    assert (config.sample_from_anchor, config.max_drafts) == (False, 4)
    assert [(choice.name, choice.value, choice.reason) for choice in config.choices] == [
        ("sample_from_anchor", "false", "the file does not say; default of the format")
    ]
    assert parsed(dflash(architectures=["DFlashSpeculator"])) == config
    assert parsed(dflash(sample_from_anchor=False)).choices == ()


def test_the_layout_of_dflash_drafts_is_what_the_file_says():
    assert parsed(dflash(sample_from_anchor=True)).max_drafts == 5
    assert parsed(dflash(sample_from_anchor=True, speculators_config=drafts(5))).choices == ()
    assert "found 5, allowed 4, as block_size 5 and the fill-in layout" in refusal(
        dflash(sample_from_anchor=False, speculators_config=drafts(5))
    )


@pytest.mark.parametrize("tokens", [7, 8, None])
def test_dflash_files_from_before_the_layout_field_are_fill_in_whatever_number_of_tokens_they_state(tokens):
    config = parsed(dflash(block_size=8, speculators_config=drafts(tokens)))
    assert (config.sample_from_anchor, config.max_drafts) == (False, 7)
    [choice] = config.choices
    assert (choice.name, choice.value) == ("sample_from_anchor", "false")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"markov_rank": 8}, "markov_rank: found 8, allowed 0 beside speculators_model_type 'dflash'"),
        (
            {"enable_confidence_head": True},
            "enable_confidence_head: found True, allowed false beside speculators_model_type 'dflash'",
        ),
        (
            {"speculators_config": {"algorithm": "dspark"}},
            "speculators_config.algorithm: found 'dspark', allowed dflash",
        ),
        (
            {"architectures": ["DSparkDraftModel"]},
            "found 'DSparkDraftModel', allowed DFlashDraftModel or DFlashSpeculator beside",
        ),
        ({"block_size": 1}, "block_size: found 1, allowed an integer >= 2 for the fill-in layout"),
        ({"mask_token_id": ...}, "mask_token_id: missing, allowed 0 <= id < 199"),
        ({"aux_hidden_state_layer_ids": []}, "aux_hidden_state_layer_ids: found []"),
    ],
)
def test_a_wrong_dflash_config_is_refused_by_field_value_and_rule(changes, expected):
    assert expected in refusal(dflash(**changes))
