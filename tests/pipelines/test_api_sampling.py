"""Sampling through the Python interface: seeds, several continuations, stop strings, streaming, log-probabilities."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_jax.pipelines.api import GenerationResult, Grammar, Pipeline, load
from dspark_jax.speculators_common.errors import RequestError
from tests.support import text_pair, tiny_tokenizer
from tests.support.text_pair import RecordedPair

# One policy for all tests, so that few programs are compiled. The text is ASCII: other bytes would be no characters.
SAMPLING: dict[str, Any] = {
    "max_new_tokens": 24,
    "stop_ids": (),
    "temperature": 1.1,
    "num_logprobs": 2,
    "banned_ids": (0, 1, 2, *range(tiny_tokenizer.WORDS.index("~") + 1, 199)),
}

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def pair(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> RecordedPair:
    return text_pair.with_text(text_pair.recorded_pair(data_dir), tmp_path_factory.mktemp("text_pair"))


@pytest.fixture(scope="module")
def pipeline(pair: RecordedPair) -> Pipeline:
    return load(pair.target, pair.draft, dtype="float32", num_speculative_tokens=5, max_seq_len=64)


@pytest.fixture(scope="module")
def plain(pipeline: Pipeline) -> Pipeline:
    return pipeline.without_draft()


@pytest.fixture(scope="module")
def continuations(pipeline: Pipeline, pair: RecordedPair) -> list[GenerationResult]:
    return pipeline.generate(pair.prompt(0), n=4, seed=11, **SAMPLING)


def _observable(result: GenerationResult) -> tuple[Any, ...]:
    return result.output_ids, result.text, result.finish_reason, result.prompt_tokens, result.completion_tokens


def test_every_text_can_be_made_again_from_its_seed(
    pipeline: Pipeline, plain: Pipeline, continuations: list[GenerationResult]
) -> None:
    assert [(result.sample, result.seed) for result in continuations] == [(sample, 11) for sample in range(4)]
    assert len({result.output_ids for result in continuations}) == 4
    again = plain.generate(continuations[0].prompt_ids, n=4, seed=11, **SAMPLING)
    assert list(map(_observable, again)) == list(map(_observable, continuations))
    [drawn] = pipeline.generate(continuations[0].prompt_ids, **SAMPLING)
    [remade] = plain.generate(continuations[0].prompt_ids, seed=drawn.seed, **SAMPLING)
    assert drawn.seed is not None
    assert _observable(drawn) == _observable(remade)


def test_log_probabilities_belong_to_the_output_ids(plain: Pipeline, continuations: list[GenerationResult]) -> None:
    result = continuations[0]
    assert result.logprobs is not None
    assert len(result.logprobs) == len(result.output_ids)
    for token, one in zip(result.output_ids, result.logprobs, strict=True):
        assert len(one.top) == 2
        assert one.top[0][1] >= one.top[1][1] >= -math.inf
        assert dict(one.top).get(token, one.chosen) == pytest.approx(one.chosen, abs=1e-5)
    [again] = plain.generate(result.prompt_ids, seed=result.seed, **SAMPLING)
    assert again.logprobs is not None
    np.testing.assert_allclose(
        [one.chosen for one in again.logprobs], [one.chosen for one in result.logprobs], atol=1e-5
    )


def test_statistics_follow_from_the_rounds(continuations: list[GenerationResult]) -> None:
    for result in continuations:
        assert result.prompt_tokens == 2
        assert result.completion_tokens == 24
        assert result.drafted == sum(result.drafted_per_position) == sum(one.proposed for one in result.rounds)
        assert result.accepted == sum(result.accepted_per_position) == sum(one.accepted for one in result.rounds)
        assert len(result.drafted_per_position) == len(result.accepted_per_position) == 5


@pytest.mark.parametrize("place", [0, 1, 6, 13])
def test_a_stop_string_ends_the_same_text_plainly_and_with_a_draft(
    pipeline: Pipeline, plain: Pipeline, continuations: list[GenerationResult], place: int
) -> None:
    """The string is two characters of the text, wherever tokens and rounds part them."""
    whole = continuations[0]
    assert whole.text is not None
    string = whole.text[place : place + 2]
    end = whole.text.index(string)
    options = {**SAMPLING, "seed": whole.seed, "stop_strings": [string, "nowhere"]}
    [stopped] = pipeline.generate(whole.prompt_ids, **options)
    assert stopped.finish_reason == "stop"
    assert stopped.text == whole.text[:end]
    assert stopped.output_ids == whole.output_ids[: len(stopped.output_ids)]
    tokenizer = pipeline.target.tokenizer
    assert tokenizer is not None
    assert string in tokenizer.decode(stopped.output_ids)
    assert string not in tokenizer.decode(stopped.output_ids[:-1])
    assert stopped.logprobs is not None
    assert len(stopped.logprobs) == len(stopped.output_ids)
    [plainly] = plain.generate(whole.prompt_ids, **options)
    assert _observable(plainly) == _observable(stopped)
    for one in (pipeline, plain):
        pieces = list(one.stream(whole.prompt_ids, **options))
        shown = [piece.text for piece in pieces]
        assert "".join(shown) == stopped.text
        assert tuple(token for piece in pieces for token in piece.ids) == stopped.output_ids
        assert [piece.finish_reason for piece in pieces] == [*[None] * (len(pieces) - 1), "stop"]


def test_a_stop_string_counts_after_the_least_number_of_tokens(
    pipeline: Pipeline, continuations: list[GenerationResult]
) -> None:
    whole = continuations[0]
    assert whole.text
    options = {**SAMPLING, "seed": whole.seed, "stop_strings": [*whole.text[:3]]}
    [first] = pipeline.generate(whole.prompt_ids, **options)
    assert (first.text, first.finish_reason, len(first.output_ids)) == ("", "stop", 1)
    [late] = pipeline.generate(whole.prompt_ids, min_new_tokens=3, **options)
    assert late.output_ids == whole.output_ids[: len(late.output_ids)]
    assert len(late.output_ids) > 3


def test_closing_a_stream_frees_its_row(pipeline: Pipeline, continuations: list[GenerationResult]) -> None:
    engine = pipeline.engine
    free = engine.num_free_pages
    stream = pipeline.stream(continuations[0].prompt_ids, n=2, seed=continuations[0].seed, **SAMPLING)
    assert next(stream).ids == continuations[0].output_ids[:1]
    assert engine.num_running == 1
    stream.close()
    assert (engine.num_running, engine.num_free_pages, engine.has_work) == (0, free, False)
    [again] = pipeline.generate(continuations[0].prompt_ids, seed=continuations[0].seed, **SAMPLING)
    assert again.output_ids == continuations[0].output_ids


def test_a_text_with_a_grammar_is_the_same_with_a_draft_and_streamed(
    pipeline: Pipeline, plain: Pipeline, pair: RecordedPair
) -> None:
    """The stop token comes where the JSON is complete."""
    schema = {"type": "array", "items": {"enum": ["a", "bc", 17]}, "minItems": 2, "maxItems": 3}
    options: Any = {**SAMPLING, "stop_ids": (tiny_tokenizer.END,), "banned_ids": (), "logit_bias": {5: 0.5}}
    options |= {"grammar": Grammar.json_schema(schema), "seed": 3, "n": 3, "max_new_tokens": 40}
    found = pipeline.generate(pair.prompt(0), **options)
    for one in found:
        assert one.text is not None
        assert set(json.loads(one.text)) <= {"a", "bc", 17}
        assert one.output_ids[-1] == tiny_tokenizer.END
        assert one.finish_reason == "stop"
    assert list(map(_observable, plain.generate(pair.prompt(0), **options))) == list(map(_observable, found))
    pieces = list(pipeline.stream(pair.prompt(0), **options))
    for index, one in enumerate(found):
        assert "".join(piece.text for piece in pieces if piece.index == index) == one.text


def test_a_grammar_that_nothing_matches_is_refused_before_any_text(pipeline: Pipeline, pair: RecordedPair) -> None:
    for grammar, fields in (
        (Grammar.regex("[^\\s\\S]"), {}),
        (Grammar.regex("a+"), {"banned_ids": tiny_tokenizer.byte_ids("a")}),
        (Grammar.regex("a?"), {"banned_ids": tiny_tokenizer.byte_ids("a"), "stop_ids": (5,), "min_new_tokens": 1}),
    ):
        with pytest.raises(RequestError, match=r"grammar: found .*, allowed one that a text can begin with"):
            pipeline.generate(pair.prompt(0), grammar=grammar, **fields)
    with pytest.raises(RequestError, match=r"grammar: found .*, allowed a `Grammar` of kind json_schema, regex, lark"):
        pipeline.generate(pair.prompt(0), grammar=Grammar.regex(" "))


_LETTERS = "abdefghijklmnopqrstuvwxyz"


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.lark("start: x /[0-9]+/\nx[max_tokens=3]: /[a-z]*/"),
        Grammar.lark('start: x /[0-9]+/\nx[stop="b"]: /[a-z]*/'),
        # One letter leads to an expression that is beyond the limits of llguidance. Drafts use it, texts do not.
        Grammar.regex(f"([{_LETTERS}]|cq{{99999999}}b)+"),
    ],
    ids=["max_tokens", "stop", "limits"],
)
def test_drafts_that_are_tried_do_not_change_what_a_grammar_allows(
    pipeline: Pipeline, plain: Pipeline, pair: RecordedPair, grammar: Grammar
) -> None:
    options = {**SAMPLING, "grammar": grammar, "logit_bias": {tiny_tokenizer.byte_ids("c")[0]: -40.0}}
    for seed in range(4):
        [wanted] = plain.generate(pair.prompt(0), seed=seed, **options)
        [found] = pipeline.generate(pair.prompt(0), seed=seed, **options)
        assert _observable(found) == _observable(wanted)
        assert len(wanted.output_ids) > 3
