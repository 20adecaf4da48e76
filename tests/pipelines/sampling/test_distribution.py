"""Draws of the real round have the target's distribution: both kinds of proposal, every control, all Markov heads.

60,000 draws a case, compared as texts of three tokens and token by token with the exact distribution. The last tests
make the mistakes that are near at hand and show that the same comparison finds them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.pipelines.sampling import draft_sampler, draws, edits, filters
from dspark_jax.pipelines.sampling.generation import Generation
from dspark_jax.pipelines.sampling.grammar import Grammar
from tests.support import compilation
from tests.support.bigram_pair import Pair
from tests.support.text_distribution import deviation

NUM_TEXTS = 20_000  # of three tokens: 60,000 draws
GREEDY = Generation()
ORDERED = Generation(temperature=1.5, top_k=3, top_p=0.75)  # top-p would keep more if it came first
CONTROLS = {
    "cool": Generation(temperature=0.7),
    "as it is": Generation(temperature=1.0),
    "hot": Generation(temperature=1.5),
    "top-k": Generation(temperature=1.0, top_k=3),
    "top-p": Generation(temperature=1.0, top_p=0.7),
    "min-p": Generation(temperature=1.5, min_p=0.25),
    "all filters": Generation(temperature=1.3, top_k=4, top_p=0.8, min_p=0.1),
    "penalties": Generation(temperature=1.0, repetition_penalty=1.8, presence_penalty=0.7, frequency_penalty=0.4),
    "bias": Generation(temperature=1.0, logit_bias=((1, 1.5), (2, -1.0)), banned_ids=(4,)),
}
PAIRS = {
    "argmax": Pair(),
    "argmax, fill-in, pruned, rnn": Pair("rnn", pruned=True, sample_from_anchor=False),
    "sampled": Pair(proposal="sampled"),
    "sampled, pruned": Pair(proposal="sampled", pruned=True),
    "sampled, none": Pair("none", proposal="sampled"),
    "sampled, gated": Pair("gated", proposal="sampled"),
    "sampled, fill-in, rnn": Pair("rnn", proposal="sampled", sample_from_anchor=False),
    "sampled, tanh rnn": Pair("tanh_rnn", proposal="sampled"),
    "argmax, packed": Pair(verified_share=0.5),
    "sampled, packed": Pair(proposal="sampled", verified_share=0.5),
}
BOTH_KINDS = ("argmax", "sampled, pruned")  # they run with all controls
OTHERS = tuple(pair for pair in PAIRS if pair not in BOTH_KINDS)
GRAMMAR = Generation(temperature=1.3, top_k=4, grammar=Grammar.regex("what may follow"))
MASKED = Pair(proposal="sampled", masked=True, keeps_refused=True, verified_share=0.5, pruned=True)
VARIED = dataclasses.replace(CONTROLS["penalties"], temperature=1.5, min_p=0.02)


pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture
def ordinary_compilation() -> Iterator[None]:
    """For programs that run more often than they are compiled."""
    with compilation.ordinary_compilation():
        yield


@functools.cache
def _program(pair: Pair) -> Any:
    return pair.program()


def _texts(
    pair: Pair, generations: list[Generation], program: Any = None, first_seed: int = 0
) -> tuple[np.ndarray, int]:
    texts, accepted = (program or _program(pair))(pair.rows(generations, first_seed))
    return np.asarray(texts), int(accepted)


@pytest.mark.usefixtures("ordinary_compilation")
@pytest.mark.parametrize("controls", CONTROLS)
@pytest.mark.parametrize("pair", BOTH_KINDS)
def test_texts_have_the_distribution_of_the_target(pair: str, controls: str) -> None:
    texts, accepted = _texts(PAIRS[pair], [CONTROLS[controls]] * NUM_TEXTS)
    found = deviation(texts, CONTROLS[controls])
    assert found.is_chance, found
    assert accepted > 0.1 * NUM_TEXTS


@pytest.mark.usefixtures("ordinary_compilation")
@pytest.mark.parametrize("pair", BOTH_KINDS)
def test_rows_of_a_mixed_batch_have_each_their_own_distribution(pair: str) -> None:
    """Greedy and sampled rows, each with and without a confidence threshold."""
    kinds = [dataclasses.replace(one, confidence_threshold=x) for one in (GREEDY, CONTROLS["hot"]) for x in (0, 0.5)]
    parts = [
        _texts(PAIRS[pair], kinds * (NUM_TEXTS // len(kinds)), first_seed=part * NUM_TEXTS)[0] for part in range(4)
    ]
    texts = np.concatenate(parts)
    for number, generation in enumerate(kinds):
        found = deviation(texts[number :: len(kinds)], generation)
        assert found.is_chance, (generation, found)


@pytest.mark.thorough
@pytest.mark.parametrize("pair", OTHERS)
def test_every_markov_head_and_packed_verification_keep_the_distribution(pair: str) -> None:
    texts, accepted = _texts(PAIRS[pair], [VARIED] * NUM_TEXTS)
    found = deviation(texts, VARIED)
    assert found.is_chance, found
    assert accepted > 0.1 * NUM_TEXTS


def test_texts_with_a_grammar_have_the_distribution_of_masked_logits() -> None:
    texts, accepted = _texts(MASKED, [GRAMMAR] * NUM_TEXTS)
    found = deviation(texts, GRAMMAR)
    assert found.is_chance, found
    assert accepted > 0.1 * NUM_TEXTS


def test_sampled_drafts_that_are_cut_before_they_are_refused_are_found() -> None:
    """Whether a slot is verified would depend on its own draft."""
    texts, _ = _texts(dataclasses.replace(MASKED, keeps_refused=False), [GRAMMAR] * NUM_TEXTS)
    assert not deviation(texts, GRAMMAR).is_chance


def _with_wrong(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, wrong: Any, pair: Pair) -> Any:
    """The program of a pair in which one function of the package is replaced by a wrong one."""
    monkeypatch.setattr(module, name, wrong)
    return pair.program()


def test_a_soft_q_for_argmax_drafts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The most probable draft, tested as if it had been drawn from the draft's distribution."""

    def of_the_argmax(probabilities: Any, numbers: Any) -> Any:
        del numbers
        return jnp.argmax(probabilities, axis=1).astype(jnp.int32)

    program = _with_wrong(monkeypatch, draft_sampler, "weighted_choice", of_the_argmax, PAIRS["sampled"])
    texts, _ = _texts(PAIRS["sampled"], [CONTROLS["hot"]] * NUM_TEXTS, program)
    assert not deviation(texts, CONTROLS["hot"]).is_chance


def test_one_key_for_every_purpose_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws.Uniforms, "pair", lambda self, purpose: self._numbers[:, :2])
    monkeypatch.setattr(draws.Uniforms, "one", lambda self, purpose: self._numbers[:, 0])
    texts, _ = _texts(PAIRS["sampled"], [CONTROLS["hot"]] * NUM_TEXTS, PAIRS["sampled"].program())
    assert not deviation(texts, CONTROLS["hot"]).is_chance


def test_filters_in_the_wrong_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-p over all tokens, not over those that top-k kept."""

    def both(logits: Any, largest: Any, controls: Any) -> Any:
        off = dataclasses.replace(controls, top_p=jnp.ones_like(controls.top_p))
        by_k = right(logits, largest, off)
        by_p = right(logits, largest, dataclasses.replace(controls, top_k=jnp.zeros_like(controls.top_k)))
        return jnp.minimum(by_k, by_p)

    right = filters._furthest
    program = _with_wrong(monkeypatch, filters, "_furthest", both, PAIRS["argmax"])
    texts, _ = _texts(PAIRS["argmax"], [ORDERED] * NUM_TEXTS, program)
    assert not deviation(texts, ORDERED).is_chance
    texts, _ = _texts(PAIRS["argmax"], [ORDERED] * NUM_TEXTS)
    assert deviation(texts, ORDERED).is_chance


def test_penalties_that_ignore_drafts_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_the_anchor_alone(controls: Any, text: Any, before: Any) -> Any:
        found = right(controls, text, before)
        return found._replace(is_before=found.is_before & (jnp.arange(text.width) == 0)[None])

    right = edits._block
    program = _with_wrong(monkeypatch, edits, "_block", of_the_anchor_alone, PAIRS["argmax"])
    texts, _ = _texts(PAIRS["argmax"], [CONTROLS["penalties"]] * NUM_TEXTS, program)
    assert not deviation(texts, CONTROLS["penalties"]).is_chance


def test_greedy_rows_that_are_sampled_are_found() -> None:
    """A row of temperature 0 must not be drawn at temperature 1."""
    texts, _ = _texts(PAIRS["argmax"], [CONTROLS["as it is"]] * NUM_TEXTS)
    assert not deviation(texts, GREEDY).is_chance


def test_an_exaggerated_q_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acceptance against the square root of q: drafts that are unlikely to be drawn are accepted too seldom."""
    right = draft_sampler.DraftSampler.completed

    def completed(self: Any, proposal: Any) -> Any:
        done: Any = right(self, proposal)
        return done._replace(token_probabilities=jnp.sqrt(done.token_probabilities))

    monkeypatch.setattr(draft_sampler.DraftSampler, "completed", completed)
    texts, _ = _texts(PAIRS["sampled"], [CONTROLS["hot"]] * NUM_TEXTS, PAIRS["sampled"].program())
    assert not deviation(texts, CONTROLS["hot"]).is_chance
