"""Every draft family in the same compiled round: the text is that of plain decoding, and nothing is compiled after the warm-up."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dspark_jax.pipelines.loading import LoadedDraft, LoadedTarget, load_draft, load_target
from dspark_jax.pipelines.speculative.engine import Completion, Engine, EngineOptions, Request
from tests.tiny_families import FAMILIES, VOCAB, tiny_target

NEW_TOKENS = 24
_RNG = np.random.default_rng(5)
PROMPTS = tuple(tuple(_RNG.integers(0, VOCAB, length).tolist()) for length in (3, 11, 1, 7, 5))

pytestmark = pytest.mark.usefixtures("quick_compilation")


@functools.cache
def _target(dtype: str) -> LoadedTarget:
    with tempfile.TemporaryDirectory() as folder:
        return load_target(tiny_target().write(Path(folder) / "target"), dtype)


@functools.cache
def _draft(family: str, dtype: str) -> LoadedDraft:
    with tempfile.TemporaryDirectory() as folder:
        return load_draft(FAMILIES[family](Path(folder) / "draft"), _target(dtype), dtype)


def _engine(family: str | None, batch_size: int, dtype: str) -> Engine:
    draft = None if family is None else _draft(family, dtype).module
    options = EngineOptions(max_seq_len=48, batch_size=batch_size, page_size=64, prefill_chunks=(4,), rounds_per_call=8)
    return Engine(_target(dtype).module, draft, options)


def _completions(engine: Engine, **options: Any) -> list[Completion]:
    return engine.generate([Request(prompt_ids=prompt, max_new_tokens=NEW_TOKENS, **options) for prompt in PROMPTS])


@functools.cache
def _plain() -> list[list[int]]:
    return [completion.output_ids for completion in _completions(_engine(None, 5, "float32"))]


@contextmanager
def _no_compilation() -> Iterator[None]:
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_that_of_plain_decoding_and_nothing_is_compiled_on_the_way(family: str, batch_size: int) -> None:
    plain = _plain()
    engine = _engine(family, batch_size, "float32")
    engine.warmup(stream=False)
    with _no_compilation():
        completions = _completions(engine)
    assert [completion.output_ids for completion in completions] == plain
    rounds = [pair for completion in completions for pair in completion.rounds]
    assert any(accepted for _, accepted in rounds), "no draft was ever accepted: the identity says little"
    assert not any(completion.non_finite_rounds for completion in completions)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_generates_without_compilation_too(family: str) -> None:
    engine = _engine(family, 5, "bfloat16")
    engine.warmup(stream=False)
    with _no_compilation():
        completions = _completions(engine)
    assert [len(completion.output_ids) for completion in completions] == [NEW_TOKENS] * len(PROMPTS)
    assert not any(completion.non_finite_rounds for completion in completions)
