"""The whole speculative loop against DeepSpec's evaluation loop: five runs of four prompts, all four in one batch, with
both drivers.

The reference continues while the committed length is below prompt + budget, which gives one token more than the budget,
and cuts the ids afterwards. So the engine gets a budget of one token more, and the ids are cut here.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.pipelines.checkpoints.loading import load_draft, load_target
from dspark_jax.pipelines.speculative.engine import Completion, Engine, EngineOptions, Request
from dspark_jax.pipelines.speculative.state import RoundOutput, Rows
from tests.support.compilation import ordinary_compilation
from tests.support.recorded_tensors import load_recorded
from tests.support.requests import request_for
from tests.support.rounds import Rounds

PROMPTS = range(4)
RUNS = {
    "thr0": (0.0, 48),
    "thr05": (0.5, 48),
    "thr1": (1.0, 48),
    "stop": (0.0, 48),
    "new10": (0.0, 10),
}  # threshold, new tokens

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def expected(data_dir: Path) -> dict[str, np.ndarray]:
    return load_recorded(data_dir / "D_loop")


@pytest.fixture(scope="module")
def pair(data_dir: Path) -> tuple[Any, Any]:
    target = load_target(data_dir / "D_loop" / "target", jnp.float32)
    return target.module, load_draft(data_dir / "D_loop" / "draft", target, jnp.float32).module


@pytest.fixture(scope="module")
def engine(pair: tuple[Any, Any]) -> Engine:
    return Engine(
        *pair,
        EngineOptions(batch_size=len(PROMPTS), max_seq_len=80, page_size=16, prefill_chunks=(8,), rounds_per_call=20),
    )


def _request(expected: dict[str, np.ndarray], run: str, prompt: int) -> Request:
    threshold, new_tokens = RUNS[run]
    return request_for(
        prompt_ids=tuple(expected[f"p{prompt}.prompt"].tolist()),
        max_new_tokens=new_tokens + 1,
        stop_ids=tuple(expected[f"p{prompt}.stop.stop_token_ids"].tolist()) if run == "stop" else (),
        confidence_threshold=threshold,
    )


def _acceptance_lengths(completion: Completion) -> list[int]:
    """Accepted + 1 per round. A round that ends with an accepted stop token has no bonus token."""
    lengths = [accepted + 1 for _, accepted in completion.rounds]
    if completion.finish_reason == "stop" and len(completion.output_ids) - 1 < sum(lengths):
        lengths[-1] -= 1
    return lengths


@pytest.mark.parametrize("stream", [False, True], ids=["device loop", "round by round"])
@pytest.mark.parametrize("run", RUNS)
def test_text_and_every_round_are_the_reference_s(
    engine: Engine, expected: dict[str, np.ndarray], run: str, stream: bool
) -> None:
    requests = [_request(expected, run, prompt) for prompt in PROMPTS]
    told: dict[int, list[list[int]]] = {prompt: [] for prompt in PROMPTS}
    ended: dict[int, Completion] = {}
    for index, event in engine.run(requests, stream=stream):
        told[index].append(list(event.tokens))
        ended |= {index: event.completion} if event.is_end else {}
    for prompt in PROMPTS:
        completion = ended[prompt]
        record = f"p{prompt}.{run}"
        wanted = expected[f"{record}.output_ids"].tolist()[len(completion.request.prompt_ids) :]
        assert completion.output_ids[: RUNS[run][1]] == wanted, record
        assert [proposed for proposed, _ in completion.rounds] == expected[f"{record}.proposal_lengths"].tolist(), (
            record
        )
        assert [accepted for _, accepted in completion.rounds] == expected[
            f"{record}.accepted_draft_lengths"
        ].tolist(), record
        lengths = expected[f"{record}.acceptance_lengths"].tolist()
        assert _acceptance_lengths(completion) == lengths, record
        assert completion.tau == pytest.approx(np.mean(lengths)) if lengths else completion.tau is None
        assert list(itertools.chain(*told[prompt])) == completion.output_ids
        if stream and len(lengths) > 1:
            assert [len(ids) for ids in told[prompt] if ids][1 : len(lengths)] == lengths[:-1], record


def test_plain_decoding_says_the_recorded_greedy_ids(pair: tuple[Any, Any], expected: dict[str, np.ndarray]) -> None:
    """Decoded again by the target alone."""
    options = EngineOptions(
        batch_size=len(PROMPTS), max_seq_len=80, page_size=16, prefill_chunks=(8,), rounds_per_call=20
    )
    requests = [
        request_for(prompt_ids=tuple(expected[f"p{prompt}.prompt"].tolist()), max_new_tokens=48) for prompt in PROMPTS
    ]
    for prompt, completion in enumerate(Engine(pair[0], None, options).generate(requests)):
        assert [*requests[prompt].prompt_ids, *completion.output_ids] == expected[f"p{prompt}.greedy_ids"].tolist()


def test_runs_without_a_stop_token_say_what_plain_decoding_says(expected: dict[str, np.ndarray]) -> None:
    """Checks the records: the ids that other tests compare with are greedy text."""
    for prompt, run in itertools.product(PROMPTS, ("thr0", "thr05", "thr1")):
        assert expected[f"p{prompt}.{run}.output_ids"].tolist() == expected[f"p{prompt}.greedy_ids"].tolist()


def test_the_stop_runs_end_inside_a_block_at_its_end_and_at_the_first_token(
    engine: Engine, expected: dict[str, np.ndarray]
) -> None:
    completions = engine.generate([_request(expected, "stop", prompt) for prompt in PROMPTS])
    kinds = set()
    for completion in completions:
        assert completion.finish_reason == "stop"
        ends_in_draft = sum(accepted + 1 for _, accepted in completion.rounds) > len(completion.output_ids) - 1
        kinds.add("first" if not completion.rounds else "draft" if ends_in_draft else "own")
    assert kinds == {"first", "draft", "own"}


@pytest.fixture(scope="module", params=["quick", "ordinary"])
def rounds(request: pytest.FixtureRequest, pair: tuple[Any, Any]) -> Iterator[Rounds]:
    """The step under both compilations. The second is the program that a user runs."""
    with ordinary_compilation() if request.param == "ordinary" else contextlib.nullcontext():
        jax.clear_caches()  # pairs of equal structure share their programs
        yield Rounds(*pair, num_rows=len(PROMPTS), width=20, page_size=16, pages_per_row=5)


@pytest.mark.parametrize("run", RUNS)
def test_drafts_and_next_tokens_of_every_round_are_the_reference_s(
    rounds: Rounds, expected: dict[str, np.ndarray], run: str
) -> None:
    requests = [_request(expected, run, prompt) for prompt in PROMPTS]
    for row, request in enumerate(requests):
        rounds.admit(
            row,
            budget=request.generation.max_new_tokens,
            stop_ids=request.stop_ids,
            threshold=request.generation.confidence_threshold,
        )
    rounds.prefill({row: request.prompt_ids for row, request in enumerate(requests)})
    trace: list[tuple[Rows, RoundOutput]] = []
    while not bool(rounds.rows.finished.all()):
        trace.append((rounds.rows, rounds.step()))
    for row in PROMPTS:
        record = f"p{row}.{run}"
        steps = [(rows, output) for rows, output in trace if output.is_round[row]]
        starts = expected[f"{record}.round_start"].tolist()
        assert [int(rows.committed[row]) for rows, _ in steps] == starts
        drafts = [
            [
                token if k < rows.proposal.length[row] else -1
                for k, token in enumerate(rows.proposal.tokens[row].tolist())
            ]
            for rows, _ in steps
        ]
        assert drafts == expected[f"{record}.round_drafts"].tolist()
        # The last round may be cut, by the budget or an accepted stop token, before its next token.
        said = [int(output.tokens[row, output.accepted[row]]) for _, output in steps[:-1]]
        assert said == expected[f"{record}.round_next"].tolist()[:-1]
