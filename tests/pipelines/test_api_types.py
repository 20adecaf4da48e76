"""Options of a wrong type are one clear error, as those of a wrong value are.

Where annotations are checked at run time, such a call does not reach the package.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_jax.pipelines.api import PreparedPipeline, prepare
from dspark_jax.pipelines.sampling.generation import Generation
from dspark_jax.pipelines.sampling.grammar import Grammar
from dspark_jax.speculators_common.errors import RequestError
from tests.support import text_pair
from tests.support.text_pair import RecordedPair

any_grammar: Any = Grammar  # takes wrong types


class BytesPath(os.PathLike[bytes]):
    """A path that is no text."""

    def __fspath__(self) -> bytes:
        return b"x"


@pytest.fixture(autouse=True)
def annotations_are_not_checked(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--annotation-checks"):
        pytest.skip("the run-time checks refuse these calls themselves")


@pytest.fixture(scope="module")
def pair(data_dir: Path) -> RecordedPair:
    return text_pair.recorded_pair(data_dir)


@pytest.fixture(scope="module")
def prepared(pair: RecordedPair) -> PreparedPipeline:
    return prepare(pair.target, pair.draft, dtype="float32", num_speculative_tokens=5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 2.0}, r"max_new_tokens: found 2\.0, allowed 1 or more"),
        ({"max_new_tokens": "4"}, "max_new_tokens: found '4'"),
        ({"stop_ids": (75.9,)}, r"stop_ids: found \(75\.9,\), allowed ids 0\.\.198"),
        ({"stop_ids": (True,)}, "stop_ids: found"),
        ({"stop_ids": ("75",)}, "stop_ids: found"),
        ({"stop_ids": 5}, "stop_ids: found 5, allowed a list of token ids"),
        ({"banned_ids": 5}, "banned_ids: found 5, allowed a list of token ids"),
        ({"banned_ids": None}, "banned_ids: found None, allowed a list of token ids"),
        ({"banned_ids": b"x"}, "banned_ids: found b'x', allowed a list of token ids"),
        ({"logit_bias": (([1], 2.0),)}, r"logit_bias: found \[\[1\]\], allowed ids 0\.\.198"),
        ({"logit_bias": ({172: -50, 0: 4},)}, "logit_bias: found .*, allowed pairs of a token id and a finite number"),
        ({"logit_bias": ({172, -50},)}, "logit_bias: found .*, allowed pairs of a token id and a finite number"),
        ({"logit_bias": ((3, 1.0), (3, 2.0))}, "logit_bias: found .*, allowed each id once"),
        ({"repetition_penalty": 1e-40}, r"repetition_penalty: found 1e-40, allowed 1e-06\.\.1e\+06"),
        ({"confidence_threshold": "0.5"}, r"confidence_threshold: found '0\.5', allowed 0\.\.1"),
        ({"confidence_threshold": None}, "confidence_threshold: found None"),
        ({"temperature": "hot"}, r"temperature: found 'hot', allowed 0\.\.100"),
        ({"grammar": "a+"}, r"grammar: found 'a\+', allowed a `Grammar` of kind json_schema, regex, lark with a text"),
        (
            {"grammar": lambda: any_grammar("python", "a")},
            r"grammar: found Grammar\(kind='python', text='a'\), allowed",
        ),
        ({"grammar": lambda: any_grammar("regex", 5)}, r"grammar: found Grammar\(kind='regex', text=5\), allowed"),
    ],
)
def test_an_option_of_a_request(prepared: PreparedPipeline, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        prepared.requests([1, 2, 3], Generation(**{name: _made(value) for name, value in options.items()}))


def _made(value: Any) -> Any:
    """The value, or what it makes: annotations may be checked while the tests are collected."""
    return value() if callable(value) else value


@pytest.mark.parametrize("found", [5, b"x", 1.5, ["a"], True, "", BytesPath()])
def test_a_name_of_a_checkpoint(found: Any, tmp_path: Path) -> None:
    for argument, named in (("target", (found,)), ("draft", (tmp_path, found))):
        with pytest.raises(RequestError) as caught:
            prepare(*named)
        error = caught.value
        assert (error.field, error.found, error.file) == (argument, found, "")
        others = "a .gguf file, smollm2 " if argument == "target" else ""
        assert str(error) == (
            f"{argument}: found {found!r}, allowed the name of a checkpoint: a directory, {others}or a Hugging Face id "
            "(ORG/NAME or ORG/NAME@REVISION)"
        )
    with pytest.raises(RequestError, match="target: found None"):
        prepare(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_seq_len": "64"}, "max_seq_len: found '64'"),
        ({"max_seq_len": 64.0}, r"max_seq_len: found 64\.0"),
        ({"batch_size": 2.0}, r"batch_size: found 2\.0, allowed 1 or more"),
        ({"batch_size": True}, "batch_size: found True"),
        ({"sample_from_anchor": "no"}, "sample_from_anchor: found 'no', allowed true or false"),
        ({"partial_rotary_factor": "x"}, "partial_rotary_factor: found 'x', allowed a number"),
        ({"partial_rotary_factor": True}, "partial_rotary_factor: found True"),
        ({"proposal": "most"}, "proposal: found 'most', allowed argmax or sampled"),
    ],
)
def test_an_argument_of_load(pair: RecordedPair, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        prepare(pair.target, pair.draft, **options)


def test_a_kind_of_proposal_that_does_not_exist(pair: RecordedPair) -> None:
    wrong: Any = "beam"
    with pytest.raises(RequestError, match="proposal: found 'beam', allowed argmax or sampled"):
        prepare(pair.target, pair.draft, dtype="float32", proposal=wrong)


def test_a_prompt_of_numbers_that_are_no_ids(prepared: PreparedPipeline) -> None:
    wrong: Any = np.asarray([0.5])
    with pytest.raises(RequestError, match="prompt: found a float, allowed text, a list of token ids"):
        prepared.requests(wrong)


@pytest.mark.parametrize("found", [True, False, 0, 5, ("relaxed",)])
def test_an_acceptance_rule(pair: RecordedPair, found: Any) -> None:
    with pytest.raises(RequestError, match=r"acceptance: found .*, allowed a rule"):
        prepare(pair.target, pair.draft, dtype="float32", num_speculative_tokens=5, acceptance=found)


def test_small_integers_of_numpy_do_not_wrap_around(prepared: PreparedPipeline) -> None:
    options: dict[str, Any] = {
        "max_new_tokens": np.int8(100),
        "min_new_tokens": np.uint8(30),
        "stop_ids": (np.int8(71),),
        "logit_bias": ((np.int8(3), 1),),
    }
    generation = Generation(**options)
    [request] = prepared.requests(np.arange(100, dtype=np.int8), generation)
    values = (generation.max_new_tokens, generation.min_new_tokens, generation.stop_ids, generation.logit_bias[0][0])
    assert values == (100, 30, (71,), 3)
    numbers = [*values[:2], *(values[2] or ()), values[3], *request.prompt_ids]
    assert {type(number) for number in numbers} == {int}
