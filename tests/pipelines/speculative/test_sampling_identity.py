"""With a seed, everything that a request can observe is the same in plain and in speculative decoding with argmax
drafts: alone and in a batch, with either driver, whatever its neighbours ask for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dspark_jax.pipelines.sampling.generation import Generation, Request
from dspark_jax.pipelines.speculative.engine import Completion, Engine, EngineOptions
from tests.support.random_pairs import VOCAB, bigram_draft, plain_greedy, random_prompts, random_target, successors_in
from tests.support.sampled_twin import sampled_texts
from tests.support.tiny_checkpoints import load_pair

NEW_TOKENS = 12
PROMPTS = tuple(random_prompts(12, seed=8))
GENERATIONS = {
    "greedy": Generation(),
    "temperature": Generation(temperature=0.7, seed=1),
    "hot": Generation(temperature=1.5, seed=2**63),
    "top-k": Generation(temperature=1.0, top_k=3, seed=3),
    "top-p": Generation(temperature=1.0, top_p=0.6, seed=4),
    "min-p": Generation(temperature=1.2, min_p=0.2, seed=5),
    "all filters": Generation(temperature=0.9, top_k=9, top_p=0.8, min_p=0.05, seed=6),
    "greedy, penalties": Generation(repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.25),
    "penalties": Generation(
        temperature=0.8, repetition_penalty=1.3, presence_penalty=-0.5, frequency_penalty=1, seed=7
    ),
    "bias": Generation(temperature=1.0, logit_bias=((3, 2.0), (4, -5.0)), banned_ids=(0, 7, 9), seed=8),
    "stop": Generation(temperature=0.7, stop_ids=tuple(range(0, VOCAB, 8)), seed=9),
    "late stop": Generation(temperature=0.7, stop_ids=tuple(range(0, VOCAB, 8)), min_new_tokens=6, seed=9),
}

pytestmark = pytest.mark.usefixtures("quick_compilation")


def _requests(generations: Sequence[Generation], num_logprobs: int | None = None) -> list[Request]:
    limits: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "num_logprobs": num_logprobs}
    return [
        Request(prompt_ids=prompt, generation=dataclasses.replace(generation, **limits))
        for prompt, generation in zip(PROMPTS, generations, strict=True)
    ]


@functools.cache
def _engine(draft: bool, batch_size: int) -> Engine:
    texts = plain_greedy(PROMPTS, NEW_TOKENS)
    followed = bigram_draft(successors_in(PROMPTS, texts), num_layers=1, block_size=4)
    pair: tuple[Any, Any] = load_pair(random_target(), followed if draft else None)
    sizes: dict[str, Any] = {"max_seq_len": 40, "page_size": 8, "prefill_chunks": (4,), "rounds_per_call": 7}
    return Engine(*pair, EngineOptions(batch_size=batch_size, **sizes))


@functools.cache
def _plain() -> list[Completion]:
    return _engine(False, 1).generate(_requests(list(GENERATIONS.values()), num_logprobs=4))


def _observable(completion: Completion) -> tuple[Any, ...]:
    return completion.output_ids, completion.finish_reason


def _assert_same(found: Sequence[Completion]) -> None:
    for name, one, plain in zip(GENERATIONS, found, _plain(), strict=True):
        assert _observable(one) == _observable(plain), name
        assert len(one.logprobs) == len(plain.logprobs)
        for here, there in zip(one.logprobs, plain.logprobs, strict=True):
            np.testing.assert_allclose(here.chosen, there.chosen, atol=1e-5)
            assert [token for token, _ in here.top] == [token for token, _ in there.top]
            np.testing.assert_allclose([value for _, value in here.top], [value for _, value in there.top], atol=1e-5)


def test_plain_decoding_gives_the_text_of_a_naive_twin() -> None:
    """The twin computes every text anew in float64, sorts vocabularies, and takes the same random numbers."""
    twin = sampled_texts(_requests(list(GENERATIONS.values())))
    for name, completion, (ids, logprobs) in zip(GENERATIONS, _plain(), twin, strict=True):
        assert completion.output_ids == ids, name
        np.testing.assert_allclose([one.chosen for one in completion.logprobs], logprobs, atol=1e-4)


@pytest.mark.parametrize("stream", [False, True])
def test_a_seeded_text_is_the_same_with_a_draft_and_in_a_batch(stream: bool) -> None:
    found = _engine(True, 5).generate(_requests(list(GENERATIONS.values()), num_logprobs=4), stream=stream)
    _assert_same(found)
    sampled = [one for name, one in zip(GENERATIONS, found, strict=True) if not name.startswith("greedy")]
    assert sum(accepted for one in sampled for _, accepted in one.rounds) > 10


def test_a_seeded_text_is_the_same_in_a_batch_without_a_draft() -> None:
    _assert_same(_engine(False, 5).generate(_requests(list(GENERATIONS.values()), num_logprobs=4)))
