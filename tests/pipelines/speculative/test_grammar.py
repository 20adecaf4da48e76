"""Texts with a grammar: every token is one that the grammar allows after the tokens before it, and plain and
speculative decoding give the same texts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from dspark_jax.pipelines.compilation import CompileClock
from dspark_jax.pipelines.sampling.continuations import Continuations
from dspark_jax.pipelines.sampling.generation import Generation, Request
from dspark_jax.pipelines.sampling.policy import Policy
from dspark_jax.pipelines.sampling.token_masks import has_token
from dspark_jax.pipelines.speculative.engine import Completion, Engine, EngineOptions
from dspark_jax.speculators_common.errors import RequestError
from tests.support.random_pairs import VOCAB, bigram_draft, frequent_successors, random_prompts, random_target
from tests.support.sampled_twin import sampled_texts
from tests.support.sequence_watch import SequenceWatch
from tests.support.tiny_checkpoints import load_pair
from tests.support.toy_matcher import LONGEST, SHORTEST, TOY, ToyMatcher, allowed_next, following, is_complete

STOPS = tuple(range(0, VOCAB, 8))
# One id is banned everywhere, so that few policies are compiled.
GENERATIONS = {
    "greedy": Generation(grammar=TOY),
    "greedy, stops": Generation(grammar=TOY, stop_ids=STOPS),
    "temperature": Generation(grammar=TOY, temperature=0.7, seed=1, stop_ids=STOPS),
    "no grammar": Generation(temperature=0.8, seed=2),
    "filters": Generation(grammar=TOY, temperature=1.2, top_k=9, top_p=0.8, min_p=0.05, seed=3),
    "greedy, no grammar": Generation(stop_ids=STOPS),
    "penalties": Generation(
        grammar=TOY, temperature=0.8, repetition_penalty=1.3, frequency_penalty=1, logit_bias=((3, 2.0),), seed=4
    ),
    "late stop": Generation(grammar=TOY, temperature=0.9, stop_ids=STOPS, min_new_tokens=9, seed=5),
    "budget": Generation(grammar=TOY, max_new_tokens=6),
}
PROMPTS = tuple(random_prompts(len(GENERATIONS), seed=4))
SIZES: dict[str, Any] = {"max_seq_len": 40, "page_size": 8, "prefill_chunks": (4,), "rounds_per_call": 7}

pytestmark = pytest.mark.usefixtures("quick_compilation")


def _requests(**changes: Any) -> list[Request]:
    common = {"banned_ids": (1,), "num_logprobs": 2, **changes}
    generations = [dataclasses.replace(generation, **common) for generation in GENERATIONS.values()]
    return [
        Request(prompt_ids=prompt, generation=generation, new_matcher=ToyMatcher if generation.grammar else None)
        for prompt, generation in zip(PROMPTS, _limited(generations), strict=True)
    ]


def _limited(generations: Sequence[Generation]) -> list[Generation]:
    return [dataclasses.replace(one, max_new_tokens=min(one.max_new_tokens, LONGEST + 2)) for one in generations]


@functools.cache
def _twin() -> list[tuple[list[int], list[float]]]:
    return sampled_texts(_requests(), allowed_next)


@functools.cache
def _pair() -> tuple[Any, Any]:
    """A draft that has learned the constrained texts, so that many drafts are right and some leave the grammar."""
    texts = [(prompt[-1], *ids) for prompt, (ids, _) in zip(PROMPTS, _twin(), strict=True)]
    return load_pair(random_target(), bigram_draft(frequent_successors(texts), num_layers=1, block_size=4))


@functools.cache
def _plain() -> list[Completion]:
    """Of the requests with a grammar."""
    return _plain_engine().generate([one for one in _requests() if one.generation.grammar])


@functools.cache
def _plain_engine() -> Engine:
    return Engine(_pair()[0], None, EngineOptions(**SIZES))


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Three rows, but only the pages for two long requests."""
    return Engine(*_pair(), EngineOptions(batch_size=3, num_pages=7, **SIZES))


def _assert_right(found: Sequence[Completion]) -> None:
    """Texts and log-probabilities are those of the twin."""
    texts = {request.prompt_ids: text for request, text in zip(_requests(), _twin(), strict=True)}
    for one in found:
        ids, logprobs = texts[one.request.prompt_ids]
        assert one.output_ids == ids, one.request.generation
        np.testing.assert_allclose([each.chosen for each in one.logprobs], logprobs, atol=1e-4)


def _assert_valid(completion: Completion) -> None:
    """Every token may stand where it stands, and a text that ended by itself is complete."""
    request, ids = completion.request, completion.output_ids
    for place, token in enumerate(ids):
        allowed = allowed_next(request, ids[:place])
        assert allowed is None or allowed[token]
    if request.generation.grammar is not None and completion.finish_reason == "stop":
        assert is_complete(ids[:-1] if ids[-1] in request.stop_ids else ids)


def test_plain_decoding_gives_the_text_of_a_naive_twin() -> None:
    _assert_right(_plain())
    for completion in _plain():
        _assert_valid(completion)
    reasons = [(len(one.output_ids), one.finish_reason) for one in _plain()]
    assert reasons[0] == (LONGEST, "stop")  # nothing may follow, and there is no stop token
    assert reasons[-1] == (6, "length")
    assert any(SHORTEST < length < LONGEST and reason == "stop" for length, reason in reasons)


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_is_the_same_with_a_draft_in_a_batch_and_after_preemption(engine: Engine, stream: bool) -> None:
    before = engine.counters.preempted
    found = engine.generate(_requests(), stream=stream)
    assert engine.counters.preempted > before
    _assert_right(found)
    masked = [one for one in found if one.request.generation.grammar]
    assert [one.finish_reason for one in masked] == [one.finish_reason for one in _plain()]
    rounds = [figures for one in masked for figures in one.rounds]
    assert sum(accepted for _, accepted in rounds) > len(rounds) / 2
    assert any(proposed < 4 for proposed, _ in rounds)


def test_masks_that_ignore_the_drafts_are_found(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same comparison, with the mask after the anchor at every place."""
    right = Continuations.masks

    def wrong(self: Continuations, drafts: Sequence[int]) -> np.ndarray:
        first = right(self, ())
        count = next((place for place, draft in enumerate(drafts) if not has_token(first[0], draft)), len(drafts))
        return np.tile(first, (count + 1, 1))

    monkeypatch.setattr(Continuations, "masks", wrong)
    with pytest.raises(AssertionError):
        _assert_right(engine.generate(_requests(), stream=True))


def test_a_proposal_is_cut_at_the_first_draft_that_leaves_the_grammar() -> None:
    generation = Generation(grammar=TOY, stop_ids=STOPS, banned_ids=(1,))
    request = Request(prompt_ids=(1,), generation=generation, new_matcher=ToyMatcher)
    random, cuts = np.random.default_rng(0), set()
    for _ in range(60):
        ids = _walk(request, int(random.integers(0, LONGEST)), random)
        found = Continuations(ToyMatcher(), generation, VOCAB)
        assert found.advance(ids) is None
        drafts = random.choice(sorted(following(ids)), 4).tolist()
        masks = found.masks(drafts)
        for place, mask in enumerate(masks):
            text = [*ids, *drafts[:place]]
            expected = np.ones(VOCAB, bool) if text[-1:] and text[-1] in STOPS else allowed_next(request, text)
            np.testing.assert_array_equal([has_token(mask, token) for token in range(VOCAB)], expected)
        if len(masks) <= len(drafts):
            is_over = len(masks) > 1 and drafts[len(masks) - 2] in STOPS
            assert is_over or not has_token(masks[-1], drafts[len(masks) - 1])
        cuts.add(len(masks) - 1)
        np.testing.assert_array_equal(found.masks(drafts), masks)  # nothing was kept
    assert cuts == {0, 1, 2, 3, 4}


def _walk(request: Request, length: int, random: np.random.Generator) -> list[int]:
    """A text of the grammar, without stop tokens."""
    ids: list[int] = []
    for _ in range(length):
        ids.append(int(random.choice(sorted(following(ids) - {*STOPS, *request.generation.banned_ids}))))
    return ids


def test_a_text_ends_where_the_options_forbid_all_that_the_grammar_allows(engine: Engine) -> None:
    """In the middle of a block, where the device has to choose something: that is no part of the text."""

    class OneWay(ToyMatcher):
        """Follows one text; after its sixth token nothing but the banned id may come."""

        def allowed(self) -> np.ndarray:
            only = [*text[:6], 1, 1][min(len(self.ids), 7)]
            return np.packbits(np.eye(64, dtype=np.uint8)[only], bitorder="little").view("<u4").astype(np.uint32)

        def push(self, token: int) -> bool:
            is_right = token == [*text[:6], 1, 1][min(len(self.ids), 7)]
            self.ids += [token] if is_right else []
            return is_right

    requests = _requests()
    text, _ = _twin()[0]
    ways = [dataclasses.replace(requests[0], new_matcher=OneWay), requests[3], requests[5]]
    found = engine.generate(ways)[0]
    assert (found.output_ids, found.finish_reason) == (text[:6], "stop")
    assert len(found.logprobs) == 6
    [plain] = _plain_engine().generate(ways[:1])
    assert (plain.output_ids, plain.finish_reason) == (text[:6], "stop")
    nothing = dataclasses.replace(requests[0], new_matcher=lambda: OneWay(text[:6]))
    [found] = engine.generate([nothing])
    assert (found.output_ids, found.finish_reason, found.committed) == ([], "stop", 0)


def test_a_watch_and_a_grammar_end_a_text_where_the_first_of_them_does(engine: Engine) -> None:
    request, (text, _) = _requests()[0], _twin()[0]
    for end in (3, LONGEST):
        watched = dataclasses.replace(request, new_watch=functools.partial(SequenceWatch, text[:end]))
        [found] = engine.generate([watched])
        assert (found.output_ids, found.finish_reason) == (text[:end], "stop")


def test_the_first_sampled_draft_that_is_refused_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_distribution.py` shows that the distribution is right only then."""
    right, lengths = Continuations.masks, []

    def recorded(self: Continuations, drafts: Sequence[int]) -> np.ndarray:
        masks = right(self, drafts)
        lengths.append(min(len(masks), len(drafts)))
        return masks

    monkeypatch.setattr(Continuations, "masks", recorded)
    engine = Engine(*_pair(), EngineOptions(proposal="sampled", **SIZES))
    refused = 0
    for request in _requests():
        if request.generation.grammar and request.generation.samples:
            lengths.clear()
            [found] = engine.generate([request])
            _assert_valid(found)
            proposed = [one for one, _ in found.rounds]
            assert proposed[:-1] == lengths[-len(proposed) : -1]  # a stop token cuts the last one
            refused += sum(0 < one < 4 for one in proposed[:-1])
    assert refused > 0


def test_a_grammar_needs_a_matcher(engine: Engine) -> None:
    request = dataclasses.replace(_requests()[0], new_matcher=None)
    with pytest.raises(RequestError, match=r"grammar: found 'toy', allowed only with `Request.new_matcher`"):
        engine.submit(request)


def test_warmup_compiles_what_a_grammar_needs() -> None:
    """No device loop, and nothing is compiled after it."""
    jax.clear_caches()  # what other tests compiled must not serve here
    engine = Engine(_pair()[0], None, EngineOptions(**SIZES))
    assert engine.warmup(policies=[Policy(masks=True)]) == 2  # a prompt chunk and a round
    request = Request(prompt_ids=(1, 2), generation=Generation(grammar=TOY), new_matcher=ToyMatcher)
    with CompileClock().watching() as clock:
        [found] = engine.generate([request])
    assert len(found.output_ids) == LONGEST
    assert clock.seconds() == 0
