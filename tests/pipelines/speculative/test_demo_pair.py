"""The demo pair in float32: the recorded reference and plain decoding give the same text and acceptance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from dspark_jax.pipelines.checkpoints.loading import LoadedTarget, load_draft, load_target
from dspark_jax.pipelines.speculative.engine import Completion, Engine, EngineOptions
from tests.support.requests import request_for

pytest.importorskip("gguf", reason="the demo target is a GGUF file")
pytestmark = [pytest.mark.smollm2, pytest.mark.slow]

DRAFT = Path(__file__).parents[3] / "models" / "smollm2-135m-dspark"
RECORD: dict[str, Any] = json.loads((DRAFT / "expected.json").read_text())
NEW_TOKENS = RECORD["max_new_tokens"]


# The recorded loop runs while the anchor is below prompt + budget: one token more than ours.
REQUESTS = [
    request_for(prompt_ids=tuple(sample["prompt_ids"]), max_new_tokens=NEW_TOKENS + 1, stop_ids=(RECORD["stop_token"],))
    for sample in RECORD["samples"]
]


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return load_target("smollm2", jnp.float32)


@pytest.fixture(scope="module")
def completions(target: LoadedTarget) -> list[Completion]:
    return Engine(
        target.module, load_draft(DRAFT, target, jnp.float32).module, EngineOptions(max_seq_len=256)
    ).generate(REQUESTS)


@pytest.fixture(scope="module")
def plain(target: LoadedTarget) -> list[Completion]:
    """All requests in one batch: the text of a row does not depend on other rows."""
    return Engine(target.module, None, EngineOptions(max_seq_len=256, batch_size=len(REQUESTS))).generate(REQUESTS)


@pytest.mark.parametrize("index", range(len(RECORD["samples"])))
def test_text_and_accepted_lengths_are_the_recorded_ones(completions: list[Completion], index: int) -> None:
    completion, sample = completions[index], RECORD["samples"][index]
    assert completion.output_ids[: len(sample["greedy_ids"])] == sample["greedy_ids"]
    lengths = [accepted + 1 for _, accepted in completion.rounds]
    if sum(lengths) != completion.committed:  # the last round ended in an accepted stop token
        lengths[-1] -= 1
    assert lengths == sample["accepted_lengths"]


@pytest.mark.thorough
@pytest.mark.parametrize("index", range(len(RECORD["samples"])))
def test_plain_decoding_gives_the_same_ids(plain: list[Completion], index: int) -> None:
    recorded = RECORD["samples"][index]["greedy_ids"]
    assert plain[index].output_ids[: len(recorded)] == recorded
