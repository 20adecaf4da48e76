"""The figures of a benchmark, computed from numbers that were worked out by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.pipelines.bench.figures import (
    PageBuckets,
    ProgramSeconds,
    Run,
    common_prefix,
    compare,
    mean_seconds,
    mode_figures,
)
from dspark_jax.pipelines.bench.machine import roofline, streamed_weight_bytes
from dspark_jax.pipelines.checkpoints.checkpoint import open_checkpoint
from dspark_jax.pipelines.speculative.engine import Completion
from tests.support.requests import request_for


def _run(
    rounds: list[tuple[int, int]],
    seconds: float,
    *,
    decoded: int | None = None,
    prompt_length: int = 10,
    first: float = 0.5,
) -> Run:
    committed = sum(accepted + 1 for _, accepted in rounds)
    return Run(
        prompt_length=prompt_length,
        output_ids=tuple(range((committed if decoded is None else decoded) + 1)),
        rounds=tuple(rounds),
        committed=committed,
        seconds=seconds,
        first_token_seconds=first,
    )


def _plain(steps: int, seconds: float, **fields: int) -> Run:
    return _run([(0, 0)] * steps, seconds, **fields)


def test_tau_and_acceptance_are_sums_over_rounds_not_means_of_prompts() -> None:
    # Means of the prompts' own taus would give (3 + 1.25) / 2 = 2.125.
    figures = mode_figures([[_run([(2, 2)], 1.0)], [_run([(2, 1), (2, 0), (2, 0), (2, 0)], 3.0)]])
    assert figures.rounds == 5
    assert figures.tau == pytest.approx((3 + 2 + 1 + 1 + 1) / 5)
    assert figures.offered == (5, 5)
    assert figures.accepted == (2, 1)
    assert figures.acceptance == pytest.approx((2 / 5, 1 / 5))
    assert figures.tau == pytest.approx(1 + sum(figures.acceptance))
    assert figures.tokens_per_second == pytest.approx(8 / 4.0)
    assert figures.seconds_per_round == pytest.approx(4.0 / 5)


def test_acceptance_counts_only_rounds_that_offered_a_draft_there() -> None:
    figures = mode_figures([[_run([(3, 3), (1, 1), (0, 0), (1, 0)], 1.0)]])
    assert figures.offered == (3, 1, 1)
    assert figures.accepted == (2, 1, 1)
    assert figures.acceptance == pytest.approx((2 / 3, 1.0, 1.0))


def test_a_prompt_enters_with_the_median_of_its_repeats() -> None:
    repeats = [_run([(1, 1)], seconds, first=seconds / 10) for seconds in (1.0, 9.0, 2.0)]
    figures = mode_figures([repeats, [_run([(1, 0)], 4.0, first=0.4)] * 3])
    assert figures.seconds == pytest.approx(2.0 + 4.0)
    assert figures.first_token_seconds == pytest.approx((0.2 + 0.4) / 2)
    assert figures.tokens_per_second_with_prefill == pytest.approx((2 + 1 + 2) / (6.0 + 0.6))


def test_tokens_beyond_the_budget_count_in_tau_and_not_in_speed() -> None:
    figures = mode_figures([[_run([(3, 3), (3, 3)], 2.0, decoded=5)]])
    assert figures.tau == 4
    assert figures.tokens_per_second == pytest.approx(2.5)


def test_a_run_keeps_what_the_completion_says_about_its_rounds() -> None:
    # The last round ended in an accepted stop token: no token of the target's own, 2 + 1 tokens are committed.
    request = request_for(prompt_ids=(1, 2, 3), max_new_tokens=9, stop_ids=(7,))
    completion = Completion(
        request=request,
        allowed_new_tokens=9,
        output_ids=[4, 5, 6, 7],
        finish_reason="stop",
        rounds=[(2, 1), (1, 1)],
        prefill_seconds=0.25,
        decode_seconds=2.0,
    )
    run = Run.of(completion)
    assert (run.committed, run.decoded, run.prompt_length) == (3, 3, 3)
    assert (run.seconds, run.first_token_seconds) == (2.0, 0.25)
    assert run.positions() == [3, 5]


def test_a_round_belongs_to_the_program_that_holds_its_drafts() -> None:
    buckets = PageBuckets(counts=(2, 4, 5), page_size=8)
    # Rounds at positions 10, 13, 14 with 3 drafts need 14, 17 and 18 positions: 16 fit into two pages.
    assert buckets.of_run(_run([(3, 2), (3, 0), (3, 3)], 1.0), 3) == [2, 4, 4]
    assert buckets.of_run(_run([(3, 2), (3, 0), (3, 3)], 1.0), 1) == [2, 2, 2]
    assert buckets.of_positions(33) == 5
    assert buckets.of_positions(99) == 5
    assert mean_seconds({2: 1.0, 4: 4.0}, [2, 4, 4]) == pytest.approx(3.0)


def test_the_predicted_ratio_is_tau_over_the_cost_of_a_round() -> None:
    buckets = PageBuckets(counts=(2, 4), page_size=8)
    seconds = ProgramSeconds(plain={2: 0.10, 4: 0.20}, round={2: 0.15, 4: 0.36}, verify={2: 0.12, 4: 0.24})
    plain = [[_plain(6, 0.6), _plain(6, 0.66)]]  # 6 steps at 10..15: five in two pages, the last one in four
    speculative = [
        [_run([(2, 2), (2, 2)], 0.4), _run([(2, 2), (2, 2)], 0.5)]
    ]  # at 10 and 13 with 2 drafts: 13 and 16 positions
    figures = compare("set", plain, speculative, 2, seconds, buckets)
    step = 0.10  # 15 + 1 positions still fit into two pages
    assert figures.round_cost == pytest.approx(0.15 / step)
    assert figures.predicted_ratio == pytest.approx(3 / 1.5)
    assert figures.ratio == pytest.approx((6 / 0.45) / (6 / 0.63))
    assert figures.deviation == pytest.approx(1.4 / 2 - 1)
    assert figures.draft_share == pytest.approx(1 - 0.12 / 0.15)
    assert (figures.lowest_ratio, figures.highest_ratio) == pytest.approx((0.66 / 0.5, 0.6 / 0.4))
    assert figures.ratio_with_prefill == pytest.approx((7 / (0.45 + 0.5)) / (7 / (0.63 + 0.5)))


def test_a_round_cost_weighs_programs_by_the_rounds_that_ran_in_them() -> None:
    buckets = PageBuckets(counts=(2, 4), page_size=8)
    seconds = ProgramSeconds(plain={2: 0.1, 4: 0.2}, round={2: 0.1, 4: 0.4}, verify={2: 0.1, 4: 0.2})
    plain = [[_plain(8, 1.0)]]  # at 10..17: six in two pages, two in four
    speculative = [[_run([(1, 1)] * 4, 1.0)]]  # at 10, 12, 14, 16 with one draft: three in two pages, one in four
    figures = compare("set", plain, speculative, 1, seconds, buckets)
    assert figures.round_cost == pytest.approx(((3 * 0.1 + 0.4) / 4) / ((6 * 0.1 + 2 * 0.2) / 8))
    assert figures.draft_share == pytest.approx(1 - (3 * 0.1 + 0.2) / (3 * 0.1 + 0.4))


def test_sets_together_are_all_their_rounds() -> None:
    buckets = PageBuckets(counts=(8,), page_size=8)
    seconds = ProgramSeconds(plain={8: 0.1}, round={8: 0.2}, verify={8: 0.1})
    fast, slow = [_run([(3, 3)], 0.1)], [_run([(3, 0)] * 9, 1.8)]
    figures = compare("all", [[_plain(4, 0.4)], [_plain(9, 0.9)]], [fast, slow], 3, seconds, buckets)
    assert figures.speculative.tau == pytest.approx(13 / 10)
    assert figures.ratio == pytest.approx((13 / 1.9) / (13 / 1.3))
    assert figures.prompt_ratios == pytest.approx((4.0, 0.5))


def test_texts_that_part_are_reported_with_their_common_beginning() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 3]) == 1
    assert common_prefix([1, 2, 3, 4], [1, 2, 9, 4]) == 0.5
    assert common_prefix([1, 2], [1, 2, 3, 4]) == 0.5
    assert common_prefix([], []) == 1
    one, other = _plain(3, 1.0), dataclasses.replace(_plain(3, 1.0), output_ids=(0, 1, 9, 9))
    buckets, seconds = (
        PageBuckets(counts=(8,), page_size=8),
        ProgramSeconds(plain={8: 1.0}, round={8: 1.0}, verify={8: 1.0}),
    )
    figures = compare("set", [[one], [one]], [[one], [other]], 0, seconds, buckets)
    assert figures.identical_texts == 1
    assert figures.common_prefix == pytest.approx(0.75)


def test_a_prompt_without_rounds_adds_nothing() -> None:
    empty = Run(prompt_length=4, output_ids=(5,), rounds=(), committed=0, seconds=0.0, first_token_seconds=0.5)
    assert mode_figures([[empty], [_run([(2, 1)], 1.0)]]).tau == 2
    buckets, seconds = (
        PageBuckets(counts=(8,), page_size=8),
        ProgramSeconds(plain={8: 1.0}, round={8: 1.0}, verify={8: 1.0}),
    )
    figures = compare("set", [[empty], [_plain(2, 1.0)]], [[empty], [_run([(2, 1)], 1.0)]], 2, seconds, buckets)
    assert figures.prompt_ratios == pytest.approx((1.0,))
    assert figures.identical_texts == 2


def test_the_roofline_is_one_read_of_the_weights() -> None:
    figures = roofline(300, 1000.0, 1200.0, 0.5)
    assert figures.seconds == pytest.approx(0.3)
    assert figures.reached == pytest.approx(0.6)


def test_an_embedding_beside_a_head_of_its_own_is_not_read_whole(data_dir: Path) -> None:
    tied = open_checkpoint(data_dir / "D_loop/target")
    assert "lm_head.weight" not in tied.tensors
    total = sum(int(np.prod(source.shape)) for source in tied.tensors.values())
    assert streamed_weight_bytes(tied, jnp.float32) == 4 * total
    head = dataclasses.replace(
        tied, tensors={**tied.tensors, "lm_head.weight": tied.tensors["model.embed_tokens.weight"]}
    )
    assert streamed_weight_bytes(head, jnp.bfloat16) == 2 * total
    assert streamed_weight_bytes(head, jnp.float32) == 4 * total
