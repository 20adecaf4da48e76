"""The lines that `dspark generate` prints after its outputs, from known results."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from dspark_jax.pipelines.api import GenerationResult, Round
from dspark_jax.pipelines.checkpoints.checkpoint import open_checkpoint
from dspark_jax.pipelines.checkpoints.loading import parse_checkpoint
from dspark_jax.pipelines.commands.generate_output import figure_lines, result_json, warning_lines
from dspark_jax.pipelines.compilation import CompileClock
from dspark_jax.speculators_common.formats.draft_config import DraftConfig


def _result(rounds: tuple[Round, ...] = (Round(3, 2), Round(3, 0), Round(3, 1)), **fields: Any) -> GenerationResult:
    committed = sum(pair.accepted + 1 for pair in rounds)
    result = GenerationResult(
        text="text",
        prompt_ids=(1, 2),
        output_ids=tuple(range(committed + 1)),
        sample=0,
        seed=None,
        logprobs=None,
        acceptance="exact",
        finish_reason="length",
        allowed_new_tokens=40,
        tau=committed / len(rounds) if rounds else None,
        rounds=rounds,
        non_finite_rounds=0,
        first_token_seconds=0.25,
        decode_seconds=0.5,
        compile_seconds=0.0,
    )
    return dataclasses.replace(result, **fields)


@pytest.fixture
def draft(data_dir: Path) -> DraftConfig:
    config = parse_checkpoint(open_checkpoint(data_dir / "D_loop" / "draft"), "draft")[1]
    assert isinstance(config, DraftConfig)
    return config


def test_one_output_is_timed_after_its_first_token() -> None:
    lines = figure_lines([_result()], 9.0, CompileClock(), 1.5)
    assert lines[1] == "7 tokens (length), 12.0 tokens per second after the first, tau 2.00 over 3 rounds"
    assert lines[2] == "load 1.5 s, compile 0.0 s, first token 0.25 s"


def test_several_outputs_are_timed_together_and_tau_weighs_rounds() -> None:
    lines = figure_lines([_result(), _result((Round(3, 3),))], 4.0, CompileClock(), 1.5)
    assert lines[1] == "2 prompts, 12 tokens, 3.0 tokens per second with prompts, tau 2.50 over 4 rounds"


def test_an_output_of_one_token_has_no_rates() -> None:
    assert figure_lines([_result((), output_ids=(5,))], 1.0, CompileClock(), 1.5)[1] == "1 token (length)"


def test_the_json_names_every_round() -> None:
    told = result_json(_result())
    assert told["rounds"] == [
        {"proposed": 3, "accepted": 2},
        {"proposed": 3, "accepted": 0},
        {"proposed": 3, "accepted": 1},
    ]
    assert told["seconds"] == 0.75
    assert told["tokens_per_second"] == 12.0
    assert "comparison" not in told


def test_a_first_draft_that_is_never_accepted_questions_the_layout(draft: DraftConfig) -> None:
    [warning] = warning_lines([_result((Round(3, 0),) * 40)], draft)
    assert "accepted in 0 of 40 rounds" in warning
    assert "in the anchor-first layout (--sample-from-anchor/--no-sample-from-anchor)" in warning
    [warning] = warning_lines([_result((Round(3, 0),) * 40)], dataclasses.replace(draft, sample_from_anchor=False))
    assert "in the fill-in layout" in warning


def test_few_rounds_some_luck_or_no_draft_question_nothing(draft: DraftConfig) -> None:
    assert warning_lines([_result((Round(3, 0),) * 31)], draft) == []
    assert warning_lines([_result((Round(3, 0),) * 38 + (Round(3, 1),) * 2)], draft) == []
    assert warning_lines([_result((Round(0, 0),) * 40)], draft) == []
    assert warning_lines([_result((Round(3, 0),) * 40)], None) == []


def test_overflow_is_said(draft: DraftConfig) -> None:
    [warning] = warning_lines([_result(non_finite_rounds=2), _result(non_finite_rounds=1)], draft)
    assert "overflowed after 3 rounds" in warning
