"""Requests as they are made: seeds, several continuations, stop strings. No weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_jax.pipelines.api import PreparedPipeline, prepare
from dspark_jax.pipelines.sampling.generation import Generation, changed
from dspark_jax.pipelines.sampling.policy import Policy
from dspark_jax.speculators_common.errors import RequestError
from tests.support import text_pair
from tests.support.text_pair import RecordedPair


@pytest.fixture(scope="module")
def pair(data_dir: Path) -> RecordedPair:
    return text_pair.recorded_pair(data_dir)


@pytest.fixture(scope="module")
def prepared(pair: RecordedPair, tmp_path_factory: pytest.TempPathFactory) -> PreparedPipeline:
    texts = text_pair.with_text(pair, tmp_path_factory.mktemp("texts"))
    return prepare(texts.target, texts.draft, num_speculative_tokens=5)


def test_a_prompt_whose_tokens_are_drawn_gets_a_seed(prepared: PreparedPipeline) -> None:
    first, second = prepared.requests([[5], [5]], Generation(temperature=0.5))
    assert isinstance(first.generation.seed, int)
    assert first.generation.seed != second.generation.seed
    assert (first.seed_words() == first.seed_words()).all()


def test_a_stated_seed_is_kept_and_greedy_decoding_needs_none(prepared: PreparedPipeline) -> None:
    requests = prepared.requests([[5], [5]], Generation(temperature=0.5, seed=7))
    assert [request.generation.seed for request in requests] == [7, 7]
    assert prepared.requests([5])[0].generation.seed is None


def test_continuations_of_a_prompt_stand_together_with_random_numbers_of_their_own(prepared: PreparedPipeline) -> None:
    requests = prepared.requests([[5], [6]], Generation(temperature=0.5), n=3)
    assert [(request.prompt_ids, request.sample) for request in requests] == [
        ((prompt,), sample) for prompt in (5, 6) for sample in range(3)
    ]
    assert len({request.generation.seed for request in requests}) == 2
    assert len({tuple(request.seed_words()) for request in requests}) == 6


@pytest.mark.parametrize(
    ("n", "changes", "message"),
    [
        (2, {}, "n: found 2, allowed 1 in greedy decoding"),
        (0, {"temperature": 1.0}, r"n: found 0, allowed 1\.\.1024"),
        (1025, {"temperature": 1.0}, "n: found 1025"),
        (1, {"stop_strings": "ab"}, "stop_strings: found 'ab', allowed a list of texts"),
        (1, {"stop_strings": [""]}, r"stop_strings: found \('',\), allowed texts of a character or more"),
        (1, {"stop_strings": ["a\ufffd"]}, r"stop_strings: found .*, allowed texts .* without U\+FFFD"),
        (1, {"stop_strings": ["\ud800"]}, "stop_strings: found"),
        (1, {"stop_strings": ["a", "<|im_end|>"]}, r"stop_strings: found '<\|im_end\|>', allowed text without special"),
        (1, {"min_new_tokens": 512, "max_new_tokens": 512}, "min_new_tokens: found 512, allowed at most 511 after"),
        (1, {"temperature": float("nan")}, r"temperature: found nan, allowed 0\.\.100"),
        (1, {"top_p": 0.0}, "top_p: found 0.0, allowed above 0"),
        (1, {"min_p": float("inf")}, "min_p: found inf"),
        (1, {"num_logprobs": 21}, r"num_logprobs: found 21, allowed 0\.\.20"),
    ],
)
def test_what_cannot_be_exact_is_refused(
    prepared: PreparedPipeline, n: int, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        prepared.requests([5], changed(Generation(), changes), n=n)  # type: ignore[arg-type]


def test_programs_are_compiled_for_all_requests_that_can_run_together() -> None:
    greedy, sampled, told = Policy(), Policy(samples=True), Policy(logprobs=True)
    generations = [Generation(temperature=0.5), Generation(num_logprobs=1), Generation(temperature=2.0)]
    assert set(Policy.mixtures(generations)) == {sampled, told, Policy(samples=True, logprobs=True)}
    assert Policy.mixtures([Generation()]) == (greedy,)


def test_stop_strings_need_a_tokenizer(pair: RecordedPair) -> None:
    prepared = prepare(pair.target)
    with pytest.raises(RequestError, match=r"stop_strings: found \('a',\), allowed only with a tokenizer"):
        prepared.requests([5], Generation(stop_strings=("a",)))


def test_sampled_drafts_need_a_draft(pair: RecordedPair) -> None:
    with pytest.raises(RequestError, match="proposal: found 'sampled', allowed only with a draft"):
        prepare(pair.target, proposal="sampled")


def test_a_numpy_prompt_is_a_prompt(prepared: PreparedPipeline) -> None:
    one: Any = np.asarray([5, 6, 7])
    assert [request.prompt_ids for request in prepared.requests(one)] == [(5, 6, 7)]
    assert [request.prompt_ids for request in prepared.requests([one, one[:2]])] == [(5, 6, 7), (5, 6)]
