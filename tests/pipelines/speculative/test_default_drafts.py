"""The default k: what the checkpoint states, else a number that is fast on the platform."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from dspark_jax.pipelines.checkpoints.checkpoint import open_checkpoint
from dspark_jax.pipelines.checkpoints.loading import parse_checkpoint
from dspark_jax.pipelines.speculative.default_drafts import default_drafts
from dspark_jax.pipelines.speculative.sizes import drafts_per_round
from dspark_jax.speculators_common.errors import RequestError
from dspark_jax.speculators_common.formats.draft_config import DraftConfig

DEMO = Path(__file__).parents[3] / "models" / "smollm2-135m-dspark"


@pytest.fixture(scope="module")
def demo() -> DraftConfig:
    config = parse_checkpoint(open_checkpoint(DEMO), "draft")[1]
    assert isinstance(config, DraftConfig)
    return config


def test_the_demo_draft_states_its_whole_block_and_gets_three_on_a_cpu(demo: DraftConfig) -> None:
    assert demo.stated_drafts == demo.max_drafts == 6
    k, why = default_drafts(demo, "cpu")
    assert k == 3
    assert "measured on cpu" in why


def test_fewer_than_the_block_are_taken_as_stated(demo: DraftConfig) -> None:
    assert default_drafts(dataclasses.replace(demo, stated_drafts=2), "cpu") == (2, "stated by the checkpoint")


@pytest.mark.parametrize(("block", "k"), [(1, 1), (2, 2), (3, 3), (16, 3)])
def test_a_short_block_is_taken_whole_and_a_long_one_is_not(demo: DraftConfig, block: int, k: int) -> None:
    config = dataclasses.replace(demo, block_size=block, stated_drafts=None)
    assert default_drafts(config, "cpu")[0] == k


def test_where_nothing_was_measured_the_whole_block_is_taken(demo: DraftConfig) -> None:
    assert default_drafts(demo, "tpu")[0] == 6


@pytest.mark.parametrize("asked", [0, 7, -1, True])
def test_one_rule_says_which_numbers_of_drafts_there_are(demo: DraftConfig, asked: object) -> None:
    with pytest.raises(RequestError, match="num_speculative_tokens: found") as refused:
        drafts_per_round(demo, asked)  # type: ignore[arg-type]
    assert (refused.value.field, refused.value.found) == ("num_speculative_tokens", asked)
    assert [drafts_per_round(demo, k) for k in (1, 6, None)] == [1, 6, 6]
    assert drafts_per_round(None, None) == 0
