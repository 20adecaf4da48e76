"""The demo pair in float32 keeps to a schema and to an expression, and says what plain decoding says. With more texts:
`benchmarks/grammar.py`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from dspark_jax.pipelines.api import Generation, GenerationResult, Grammar, Pipeline, load
from dspark_jax.pipelines.sampling.continuations import Continuations
from dspark_jax.pipelines.sampling.generation import Request

pytest.importorskip("gguf", reason="the demo target is a GGUF file")
pytestmark = [pytest.mark.smollm2, pytest.mark.thorough, pytest.mark.usefixtures("quick_compilation")]

DRAFT = Path(__file__).parents[3] / "models" / "smollm2-135m-dspark"
COLORS = ["red", "green", "blue"]
SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": COLORS}, "sweet": {"type": "boolean"}},
    "required": ["color", "sweet"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
}
DATE = r"(19|20)\d\d-(0[1-9]|1[0-2])"


def test_texts_are_valid_and_those_of_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few programs are compiled: both texts are greedy, and plain decoding is the same rounds without any draft."""
    sizes: dict[str, Any] = {"max_seq_len": 128, "num_speculative_tokens": 3}
    pair = load("smollm2", DRAFT, dtype="float32", **sizes)
    options = Generation(max_new_tokens=32)
    requests = [
        pair.requests(prompt, dataclasses.replace(options, grammar=grammar))[0]
        for prompt, grammar in (
            ("Describe an apple as JSON with its color.", Grammar.json_schema(SCHEMA)),
            ("When was it? Give year and month.", Grammar.regex(DATE)),
        )
    ]
    found = _results(pair, requests)
    assert [one.finish_reason for one in found] == ["stop", "stop"]
    described = json.loads(found[0].text or "")
    assert described["color"] in COLORS
    assert isinstance(described["sweet"], bool)
    assert re.fullmatch(DATE, found[1].text or "")
    assert sum(one.accepted for one in found) > 0
    right = Continuations.masks
    monkeypatch.setattr(Continuations, "masks", lambda self, drafts: right(self, ()))
    plain = _results(pair, requests)
    assert sum(one.drafted for one in plain) == 0
    assert [one.output_ids for one in plain] == [one.output_ids for one in found]


def _results(pipeline: Pipeline, requests: list[Request]) -> list[GenerationResult]:
    done = {piece.index: piece.result for piece in pipeline.run(requests) if piece.result is not None}
    return [done[index] for index in range(len(requests))]
