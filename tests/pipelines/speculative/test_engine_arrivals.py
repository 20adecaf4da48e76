"""Requests arrive, are cancelled and are preempted in any order, with fewer pages than they need. Each gets the text
that it has alone.

The expected text comes from a twin without cache and batch. The test counts which steps ran, so that it cannot pass
without mixed steps, packing and preemption.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark_jax.pipelines.speculative.engine import Completion, Engine, EngineOptions, Request
from dspark_jax.pipelines.speculative.sizes import EnginePlan
from tests.support.random_pairs import bigram_draft, frequent_successors, plain_greedy, random_prompts, random_target
from tests.support.requests import request_for
from tests.support.tiny_checkpoints import load_pair

PROMPTS = tuple(random_prompts(8, seed=11, longest=17))
LONGEST_TEXT = 24
OPTIONS = EngineOptions(
    max_seq_len=48, batch_size=3, num_pages=8, page_size=8, prefill_chunks=(6, 24), rounds_per_call=3
)
THRESHOLDS = (0.0, 0.6, 0.66, 1.0)

pytestmark = pytest.mark.usefixtures("quick_compilation")


@functools.cache
def _engine() -> Engine:
    texts = plain_greedy(PROMPTS, LONGEST_TEXT)
    successors = frequent_successors([(prompt[-1], *text) for prompt, text in zip(PROMPTS, texts, strict=True)])
    return Engine(*load_pair(random_target(), bigram_draft(successors)), OPTIONS)


@dataclasses.dataclass(frozen=True)
class Submit:
    """Submit a request for one of the prompts."""

    prompt: int
    budget: int
    stop_at: int | None  # a token of the text that is declared to be a stop token
    threshold: float


@dataclasses.dataclass(frozen=True)
class Cancel:
    """Cancel one of the requests so far, whether it runs or not."""

    which: int


@dataclasses.dataclass(frozen=True)
class Step:
    """Call `Engine.step` with one of the two drivers."""

    stream: bool


SUBMITS = st.builds(
    Submit,
    prompt=st.integers(0, len(PROMPTS) - 1),
    budget=st.integers(1, LONGEST_TEXT),
    stop_at=st.none() | st.integers(0, LONGEST_TEXT - 1),
    threshold=st.sampled_from(THRESHOLDS),
)
ACTIONS = st.lists(
    st.one_of(SUBMITS, SUBMITS, st.builds(Cancel, which=st.integers(0, 9)), st.builds(Step, stream=st.booleans())),
    min_size=3,
    max_size=18,
)


def _text_alone(action: Submit) -> tuple[list[int], str]:
    text = list(plain_greedy(PROMPTS, LONGEST_TEXT)[action.prompt][: action.budget])
    stop = plain_greedy(PROMPTS, LONGEST_TEXT)[action.prompt][action.stop_at] if action.stop_at is not None else None
    if stop in text:
        return text[: text.index(stop) + 1], "stop"
    return text, "length"


def _request(action: Submit) -> Request:
    stops = () if action.stop_at is None else (plain_greedy(PROMPTS, LONGEST_TEXT)[action.prompt][action.stop_at],)
    return request_for(
        prompt_ids=PROMPTS[action.prompt],
        max_new_tokens=action.budget,
        stop_ids=stops,
        confidence_threshold=action.threshold,
    )


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(actions=ACTIONS)
def test_every_request_gets_the_text_that_it_has_alone(actions: list[Submit | Cancel | Step]) -> None:
    engine = _engine()
    submitted: dict[int, Submit] = {}
    said: dict[int, list[int]] = {}
    ended: dict[int, str] = {}

    def step(stream: bool) -> None:
        for event in engine.step(stream=stream):
            assert event.id not in ended
            said[event.id] += event.tokens
            if event.is_end:
                assert said[event.id] == event.completion.output_ids
                ended[event.id] = str(event.completion.finish_reason)

    for action in actions:
        if isinstance(action, Submit):
            identifier = engine.submit(_request(action))
            submitted[identifier], said[identifier] = action, []
        elif isinstance(action, Cancel) and submitted:
            identifier = list(submitted)[action.which % len(submitted)]
            assert not (engine.cancel(identifier) and identifier in ended)
        elif isinstance(action, Step):
            step(action.stream)
    turns = 0
    while engine.has_work:
        step(stream=bool(turns % 2))
        turns += 1
        assert turns < 1000
    assert ended.keys() == submitted.keys()
    for identifier, action in submitted.items():
        text, reason = _text_alone(action)
        if ended[identifier] == "cancelled":
            assert said[identifier] == text[: len(said[identifier])]
        else:
            assert (said[identifier], ended[identifier]) == (text, reason)
    assert engine.num_free_pages == OPTIONS.num_pages


def test_the_sequences_mixed_packed_and_sent_rows_back() -> None:
    counters = _engine().counters
    assert counters.mixed_steps > 20
    assert counters.packed_calls > 20
    assert counters.preempted > 10
    assert counters.prompt_chunks > 20


def test_token_buckets_hold_most_of_the_drafts_and_all() -> None:
    plan: EnginePlan = _engine().plan
    assert plan.num_speculative_tokens == 5
    assert plan.token_buckets == (3 + 9, 3 + 15)
    assert dataclasses.replace(plan, options=dataclasses.replace(OPTIONS, batch_size=1)).token_buckets == (6,)
    assert dataclasses.replace(plan, is_cut_by_confidence=False).token_buckets == (18,)


def test_a_cancelled_request_leaves_its_neighbours_alone() -> None:
    engine = _engine()
    ids = [engine.submit(request_for(prompt_ids=prompt, max_new_tokens=20)) for prompt in PROMPTS[:3]]
    engine.step()
    assert engine.cancel(ids[1])
    assert not engine.cancel(ids[1])
    done: dict[int, Completion] = {}
    while engine.has_work:
        done |= {event.id: event.completion for event in engine.step() if event.is_end}
    texts = plain_greedy(PROMPTS, LONGEST_TEXT)
    assert [done[ids[row]].output_ids for row in (0, 2)] == [list(texts[row][:20]) for row in (0, 2)]
    assert done[ids[1]].finish_reason == "cancelled"
