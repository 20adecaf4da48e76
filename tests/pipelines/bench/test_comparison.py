"""The text of `--compare`, from known figures."""

from __future__ import annotations

import dataclasses

import pytest

from dspark_jax.pipelines.bench.comparison import Comparison, comparison_lines, first_difference
from dspark_jax.pipelines.bench.figures import Run, mode_figures


def _comparison(parts_at: int | None) -> Comparison:
    plain = Run(
        prompt_length=3,
        output_ids=tuple(range(9)),
        rounds=((0, 0),) * 8,
        committed=8,
        seconds=0.8,
        first_token_seconds=0.1,
    )
    rounds = ((2, 2), (2, 1), (2, 2))
    speculative = dataclasses.replace(plain, rounds=rounds, seconds=0.4)
    return Comparison(
        plain=mode_figures([[plain]]),
        speculative=mode_figures([[speculative]]),
        plain_speeds=(9.0, 10.0, 11.0),
        speculative_speeds=(18.0, 20.0, 22.0),
        num_tokens=9,
        repeats=3,
        decoding="greedy",
        not_compared="",
        parts_at=parts_at,
    )


def test_both_ways_stand_side_by_side() -> None:
    lines = comparison_lines(_comparison(None), "float32")
    cells = {line[:24].strip(): line[24:].split() for line in lines}
    assert cells["tokens per second"] == ["10.0", "20.0", "2.00", "times", "plain"]
    assert cells["lowest to highest"] == ["9.0", "to", "11.0", "18.0", "to", "22.0"]
    assert cells["milliseconds per token"] == ["100.0", "50.0"]
    assert cells["target passes"][:2] == ["8", "3"]
    assert cells["tokens per pass (tau)"][:2] == ["1.00", "2.67"]
    assert cells["offered"] == ["3", "3"]
    assert cells["accepted"] == ["3", "2"]
    assert cells["accepted of offered"] == ["100%", "67%"]
    assert lines[-1] == "outputs are equal, token for token"


def test_texts_of_sampled_drafts_are_not_compared() -> None:
    compared = dataclasses.replace(_comparison(None), decoding="temperature 0.7, seed 5", not_compared="drawn")
    lines = comparison_lines(compared, "float32")
    assert lines[0].endswith("9 tokens, temperature 0.7, seed 5, float32, 2 drafts per round")
    assert lines[-1] == "outputs are not compared: drawn"


def test_columns_are_aligned() -> None:
    rows = [
        line
        for line in comparison_lines(_comparison(None), "float32")
        if line.startswith(("tokens per second", "target passes", "  lowest"))
    ]
    ends = [
        [line.index(cell) + len(cell) for cell in cells]
        for line, cells in zip(rows, (["10.0", "20.0"], ["11.0", "22.0"], ["8", "3"]), strict=True)
    ]
    assert ends[0] == ends[1] == ends[2]


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        ("float32", "outputs part at token 6 of 9"),
        (
            "bfloat16",
            "outputs part at token 6 of 9: bfloat16 rounds differently when more rows run at once; with --dtype "
            "float32 they are equal",
        ),
    ],
)
def test_outputs_that_differ_are_admitted(dtype: str, said: str) -> None:
    assert comparison_lines(_comparison(5), dtype)[-1] == said


@pytest.mark.parametrize(
    ("one", "other", "index"),
    [
        ((1, 2), (1, 2), None),
        ((1, 2, 3), (1, 4, 3), 1),
        ((1, 2), (1, 2, 3), 2),
        ((1, 2, 3), (1, 2), 2),
        ((), (1,), 0),
        ((), (), None),
    ],
)
def test_the_first_difference(one: tuple[int, ...], other: tuple[int, ...], index: int | None) -> None:
    assert first_difference(one, other) == index
