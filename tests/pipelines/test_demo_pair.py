"""The demo pair against its recorded float32 reference: same text as plain decoding, same acceptance in every round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from dspark_jax.pipelines.loading import load_draft, load_target
from dspark_jax.pipelines.speculative.engine import Completion, Engine, EngineOptions, Request

pytest.importorskip("gguf", reason="the demo target is a GGUF file")
pytestmark = pytest.mark.smollm2

DRAFT = Path(__file__).parents[2] / "models" / "smollm2-135m-dspark"
RECORD: dict[str, Any] = json.loads((DRAFT / "expected.json").read_text())
NEW_TOKENS = RECORD["max_new_tokens"]


@pytest.fixture(scope="module")
def completions() -> list[Completion]:
    target = load_target("smollm2", jnp.float32)
    engine = Engine(target.module, load_draft(DRAFT, target, jnp.float32).module, EngineOptions(max_seq_len=256))
    # The recorded loop runs while the anchor is below prompt + budget: one token more than ours.
    requests = [
        Request(prompt_ids=tuple(sample["prompt_ids"]), max_new_tokens=NEW_TOKENS + 1, stop_ids=(RECORD["stop_token"],))
        for sample in RECORD["samples"]
    ]
    return engine.generate(requests)


@pytest.mark.parametrize("index", range(len(RECORD["samples"])))
def test_text_and_accepted_lengths_are_the_recorded_ones(completions: list[Completion], index: int) -> None:
    completion, sample = completions[index], RECORD["samples"][index]
    assert completion.output_ids[: len(sample["greedy_ids"])] == sample["greedy_ids"]
    lengths = [accepted + 1 for _, accepted in completion.rounds]
    if sum(lengths) != completion.committed:  # the last round ended in an accepted stop token
        lengths[-1] -= 1
    assert lengths == sample["accepted_lengths"]
