"""Where a request ends: at stop tokens and budgets inside a block, at the longest sequence, and with a page pool that
is too small for all requests at once.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import pytest

from dspark_jax.pipelines.sampling.generation import Generation
from dspark_jax.pipelines.speculative.engine import Completion, Engine, EngineOptions, Request
from dspark_jax.speculators_common.errors import RequestError
from tests.support.planted import BLOCK, CYCLE, VOCAB, DraftPlant, cycle_from, planted_pair, scripted_rounds, spoiled
from tests.support.random_pairs import plain_greedy, random_draft, random_prompts, random_target
from tests.support.requests import request_for
from tests.support.sequence_watch import watched
from tests.support.tiny_checkpoints import load_pair

DRIVERS = pytest.mark.parametrize("stream", [False, True], ids=["device loop", "round by round"])
OPTIONS = EngineOptions(
    max_seq_len=40, batch_size=3, num_pages=8, page_size=8, prefill_chunks=(4,), rounds_per_call=5, max_stop_ids=3
)
PROMPT = cycle_from(22, 2)  # the first token has number 0
MARKOV = spoiled({2, 9, 17})

pytestmark = pytest.mark.usefixtures("quick_compilation")


@functools.cache
def _planted_pair() -> tuple[Any, Any]:
    return planted_pair(DraftPlant(markov=MARKOV))


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Three rows, but only the pages for two requests of 20 new tokens."""
    return Engine(*_planted_pair(), OPTIONS)


def _request(**changes: Any) -> Request:
    return request_for(**{"prompt_ids": PROMPT, "max_new_tokens": 20, **changes})


def _scripted(num_tokens: int, *, stopped: bool) -> list[tuple[int, int]]:
    """(proposed, accepted) of every round of a text of `num_tokens` that ends with its last token."""
    rounds, said = [], 1
    for accepted in scripted_rounds(MARKOV, CYCLE[0], BLOCK, num_tokens):
        if said >= num_tokens:
            break
        is_cut = stopped and said + accepted >= num_tokens
        rounds.append((num_tokens - said, num_tokens - said) if is_cut else (BLOCK, accepted))
        said += accepted + 1
    return rounds


@DRIVERS
def test_a_stop_token_ends_the_text_at_every_place_of_a_block(engine: Engine, stream: bool) -> None:
    """The counters are cut, too: a stop token among accepted drafts ends the round without a bonus token."""
    lengths = range(1, 15)
    completions = engine.generate([_request(stop_ids=(CYCLE[length - 1],)) for length in lengths], stream=stream)
    kinds = set()
    for length, completion in zip(lengths, completions, strict=True):
        assert completion.output_ids == list(cycle_from(0, length))
        assert completion.finish_reason == "stop"
        assert completion.rounds == _scripted(length, stopped=True)
        ends_in_draft = bool(completion.rounds) and sum(accepted + 1 for _, accepted in completion.rounds) > length - 1
        kinds.add(ends_in_draft)
        assert completion.tau == (pytest.approx((length - 1) / len(completion.rounds)) if completion.rounds else None)
    assert kinds == {True, False}


@DRIVERS
def test_the_first_of_several_stop_tokens_counts(engine: Engine, stream: bool) -> None:
    requests = [
        _request(stop_ids=stops) for stops in ((CYCLE[9], CYCLE[4], VOCAB - 1), (VOCAB - 1, CYCLE[7]), (VOCAB - 1,))
    ]
    completions = engine.generate(requests, stream=stream)
    assert [completion.output_ids for completion in completions] == [
        list(cycle_from(0, length)) for length in (5, 8, 20)
    ]
    assert [completion.finish_reason for completion in completions] == ["stop", "stop", "length"]


@pytest.fixture(scope="module")
def plain_engine() -> Engine:
    return Engine(_planted_pair()[0], None, OPTIONS)


def _observable(completion: Completion) -> tuple[Any, ...]:
    return completion.output_ids, completion.finish_reason


@DRIVERS
def test_a_watch_ends_a_text_where_a_stop_token_would(engine: Engine, plain_engine: Engine, stream: bool) -> None:
    """Two tokens that follow one another end the text: they are in one block, in two rounds, or the first of all."""
    lengths = range(2, 15)
    watches = [watched(_request(), CYCLE[length - 2 : length]) for length in lengths]
    stops = [_request(stop_ids=(CYCLE[length - 1],)) for length in lengths]
    found = engine.generate([watched(_request(), CYCLE[:1]), *watches], stream=stream)
    expected = engine.generate([_request(stop_ids=(CYCLE[0],)), *stops], stream=stream)
    for one, other in zip(found, expected, strict=True):
        assert (*_observable(one), one.rounds, one.tau) == (*_observable(other), other.rounds, other.tau)
        assert one.finish_reason == "stop"
    plain = plain_engine.generate([watched(_request(), CYCLE[:1]), *watches], stream=stream)
    assert list(map(_observable, plain)) == list(map(_observable, found))
    assert all(one.tau in (None, 1) for one in plain)


@DRIVERS
@pytest.mark.parametrize("budget", [1, BLOCK, BLOCK + 1])
def test_a_watch_and_a_budget_end_a_text_together(
    engine: Engine, plain_engine: Engine, stream: bool, budget: int
) -> None:
    """The text ends at the budget, one token before it, or one token later than it, which is never seen."""
    requests = [
        watched(_request(max_new_tokens=budget), CYCLE[end - 1 : end])
        for end in (budget, budget + 1, max(budget - 1, 1))
    ]
    found = engine.generate(requests, stream=stream)
    assert [_observable(one) for one in found] == [
        (list(cycle_from(0, budget)), "stop"),
        (list(cycle_from(0, budget)), "length"),
        (list(cycle_from(0, max(budget - 1, 1))), "stop"),
    ]
    assert list(map(_observable, plain_engine.generate(requests, stream=stream))) == list(map(_observable, found))


def test_a_stop_token_before_the_end_of_a_watch_counts_first(engine: Engine) -> None:
    requests = [watched(_request(stop_ids=(CYCLE[stop],)), CYCLE[4:6]) for stop in (4, 5, 6)]
    assert [one.output_ids for one in engine.generate(requests)] == [list(cycle_from(0, end)) for end in (5, 6, 6)]


def test_a_row_whose_watch_ended_the_text_is_free_and_its_log_probabilities_are_cut(engine: Engine) -> None:
    request = watched(_request(num_logprobs=2), CYCLE[3:5])
    together = engine.generate([request, *[_request(num_logprobs=0)] * 2, request, request])
    assert [len(one.logprobs) for one in together] == [5, 20, 20, 5, 5]
    assert [one.finish_reason for one in together] == ["stop", "length", "length", "stop", "stop"]
    assert (engine.num_running, engine.num_free_pages) == (0, OPTIONS.num_pages)


def test_rows_decode_many_rounds_per_call_when_no_watch_runs_any_more(engine: Engine) -> None:
    """The row of the watch is inert on the device: a live row without pages would end every device loop at once."""
    engine.submit(watched(_request(), CYCLE[1:3]))
    engine.submit(_request())
    before, texts = engine.counters.round_calls, []
    for _ in range(20):
        texts += [event.completion.output_ids for event in engine.step(stream=False) if event.is_end]
    assert texts == [list(cycle_from(0, 3)), list(cycle_from(0, 20))]
    assert not engine.has_work
    assert engine.counters.round_calls - before <= 3


def test_a_watch_goes_on_after_a_preemption(engine: Engine) -> None:
    """The watch has read the tokens before; it does not read them again."""
    requests = [watched(_request(), CYCLE[16:18])] * 5
    completions = engine.generate(requests, stream=True)
    assert [_observable(one) for one in completions] == [(list(cycle_from(0, 18)), "stop")] * 5
    assert sum(one.num_resumes for one in completions) > 0


def test_stop_strings_need_a_watch(engine: Engine) -> None:
    request = Request(prompt_ids=PROMPT, generation=Generation(stop_strings=("a",)))
    with pytest.raises(RequestError, match=r"stop_strings: found \('a',\), allowed only with `Request.new_watch`"):
        engine.submit(request)


@DRIVERS
def test_a_budget_cuts_at_every_place_of_a_block(engine: Engine, stream: bool) -> None:
    budgets = range(1, 15)
    told: dict[int, list[int]] = {}
    requests = [_request(max_new_tokens=budget) for budget in budgets]
    ended: dict[int, Completion] = {}
    for index, event in engine.run(requests, stream=stream):
        told.setdefault(index, []).extend(event.tokens)
        ended |= {index: event.completion} if event.is_end else {}
    for index, budget in enumerate(budgets):
        completion = ended[index]
        assert completion.output_ids == told[index] == list(cycle_from(0, budget))
        assert completion.finish_reason == "length"
        assert completion.rounds == _scripted(budget, stopped=False)


def test_a_stop_token_at_the_last_token_of_the_budget_is_a_stop(engine: Engine) -> None:
    completion = engine.generate([_request(max_new_tokens=6, stop_ids=(CYCLE[5],))])[0]
    assert (completion.output_ids, completion.finish_reason) == (list(cycle_from(0, 6)), "stop")


@DRIVERS
def test_requests_wait_for_pages_and_all_complete(engine: Engine, stream: bool) -> None:
    """Seven requests, with pages for two whole ones. Rows take pages as they grow, and the last admitted row is
    preempted. The order of completion is free; results are in the order of requests.
    """
    budgets = (20, 17, 19, 20, 18, 20, 17)
    requests = [
        _request(prompt_ids=cycle_from(start, 2), max_new_tokens=budget) for start, budget in enumerate(budgets)
    ]
    together, ended = 0, dict[int, Completion]()
    for index, event in engine.run(requests, stream=stream):
        together = max(together, engine.num_running)
        ended |= {index: event.completion} if event.is_end else {}
    for start, budget in enumerate(budgets):
        assert ended[start].output_ids == list(cycle_from(start + 2, budget))
    assert together == 3
    assert stream or sum(completion.num_resumes for completion in ended.values()) > 0


def test_an_abandoned_run_gives_its_rows_and_pages_back(engine: Engine) -> None:
    for _ in range(4):
        running: Any = engine.run([_request(max_new_tokens=budget) for budget in (1, 20, 20)], stream=True)
        assert next(running)[0] == 0
        running.close()
    assert [completion.output_ids for completion in engine.generate([_request()] * 3)] == [list(cycle_from(0, 20))] * 3


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"prompt_ids": ()}, "prompt: found no tokens"),
        ({"prompt_ids": (1, VOCAB)}, f"prompt: found token id .{VOCAB}."),
        ({"prompt_ids": (1, -1)}, "prompt: found token id .-1."),
        ({"prompt_ids": (1,) * 40}, "prompt: found 40 tokens, allowed at most 39"),
        ({"max_new_tokens": 0}, "max_new_tokens: found 0, allowed 1 or more"),
        ({"stop_ids": (1, 2, 3, 4)}, "stop_ids: found 4 ids, allowed at most 3"),
        ({"stop_ids": (VOCAB,)}, "stop_ids"),
        (
            {"min_new_tokens": 39, "max_new_tokens": 40},
            "min_new_tokens: found 39, allowed at most 38 after this prompt",
        ),
        ({"confidence_threshold": 1.5}, "confidence_threshold: found 1.5, allowed 0..1"),
        ({"confidence_threshold": -0.1}, "confidence_threshold: found -0.1, allowed 0..1"),
    ],
    ids=str,
)
def test_a_request_that_cannot_be_served_is_refused_before_anything_runs(
    engine: Engine, changes: dict[str, Any], named: str
) -> None:
    seen: list[int] = []
    with pytest.raises(RequestError, match=named):
        seen += [index for index, _ in engine.run([_request(), _request(**changes)])]
    assert seen == []
    assert engine.generate([_request()])[0].finish_reason == "length"


def test_a_prompt_that_no_page_pool_row_can_hold_is_refused() -> None:
    small = Engine(*_planted_pair(), dataclasses.replace(OPTIONS, num_pages=2))
    with pytest.raises(RequestError, match="prompt: found 12 tokens, allowed at most 9"):
        small.plan.check(_request(prompt_ids=cycle_from(0, 12)))


@pytest.mark.parametrize("asked", [0, BLOCK + 1])
def test_more_drafts_than_the_block_gives_and_none_are_refused(asked: int) -> None:
    with pytest.raises(
        RequestError, match=f"num_speculative_tokens: found {asked}, allowed 1..{BLOCK} .*block of {BLOCK}."
    ):
        Engine(*_planted_pair(), dataclasses.replace(OPTIONS, num_speculative_tokens=asked))


LONGEST = 40
PROMPTS = tuple(random_prompts(4, seed=7))
LONG_OPTIONS = EngineOptions(max_seq_len=LONGEST, batch_size=2, page_size=8, prefill_chunks=(12,), rounds_per_call=5)


@functools.cache
def _random_pair() -> tuple[Any, Any]:
    return load_pair(random_target(), random_draft(num_layers=1))


def _assert_plain(completions: list[Completion], longest: int) -> None:
    for prompt, text, completion in zip(PROMPTS, plain_greedy(PROMPTS, LONGEST), completions, strict=True):
        assert completion.finish_reason == "length"
        assert tuple(completion.output_ids) == text[: longest - len(prompt)]


def test_a_request_that_reaches_the_longest_sequence_ends_there() -> None:
    """Prompt and output together fill `max_seq_len` to the last token, and the last one is still right."""
    engine = Engine(*_random_pair(), LONG_OPTIONS)
    requests = [request_for(prompt_ids=prompt, max_new_tokens=10_000) for prompt in PROMPTS]
    _assert_plain(engine.generate(requests), LONGEST)


def test_a_request_that_outgrows_the_page_pool_ends_there() -> None:
    """Three pages hold 24 positions, of which a round may write 6 beyond the last committed one."""
    engine = Engine(*_random_pair(), dataclasses.replace(LONG_OPTIONS, num_pages=3))
    requests = [request_for(prompt_ids=prompt, max_new_tokens=10_000) for prompt in PROMPTS]
    completions = engine.generate(requests)
    lengths = [
        len(prompt) + len(completion.output_ids) for prompt, completion in zip(PROMPTS, completions, strict=True)
    ]
    assert len(set(lengths)) == 1
    assert 18 <= lengths[0] <= 24
    _assert_plain(completions, lengths[0])


def test_every_request_of_a_long_queue_is_as_alone(engine: Engine) -> None:
    """Fourteen requests of several kinds on three rows give the same results as one by one."""
    kinds = itertools.product((1, 4, 11), ((), (CYCLE[6],)), (0, 5))
    requests = [
        _request(prompt_ids=cycle_from(start, 3), max_new_tokens=budget, stop_ids=stops)
        for budget, stops, start in kinds
    ]
    together = engine.generate(requests)
    for request, completion in zip(requests, together, strict=True):
        alone = engine.generate([request])[0]
        assert (alone.output_ids, alone.rounds, alone.finish_reason) == (
            completion.output_ids,
            completion.rounds,
            completion.finish_reason,
        )
