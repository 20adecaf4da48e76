"""Every draft family in the same compiled round: the text is that of plain decoding, and nothing is compiled after the
warm-up.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.pipelines.checkpoints.loading import LoadedDraft, LoadedTarget, load_draft, load_target
from dspark_jax.pipelines.speculative.engine import Completion, Engine, EngineOptions
from tests.support.requests import request_for
from tests.support.tiny_families import BLOCK, FAMILIES, VOCAB, tiny_target

NEW_TOKENS = 24
_RNG = np.random.default_rng(5)
PROMPTS = tuple(tuple(_RNG.integers(0, VOCAB, length).tolist()) for length in (3, 11, 1, 7, 5))

# An engine takes seconds to compile. So every family runs in both dtypes and in both batch sizes, but not in all four
# combinations.
IN_BFLOAT16 = list(zip(FAMILIES, itertools.cycle((1, 5)), strict=False))
ALONE_IN_FLOAT32 = [(family, 1) for family, batch_size in IN_BFLOAT16 if batch_size != 1]
# Each of them has a family of the same kind beside it.
VARIANTS = ("deepspec gemma4, own values, rank 0", "deepspec dflash", "speculators dflash, pruned", "compact, rnn")

pytestmark = pytest.mark.usefixtures("quick_compilation")


@functools.cache
def _target(dtype: str) -> LoadedTarget:
    with tempfile.TemporaryDirectory() as folder:
        return load_target(tiny_target().write(Path(folder) / "target"), dtype)


@functools.cache
def _draft(family: str, dtype: str) -> LoadedDraft:
    with tempfile.TemporaryDirectory() as folder:
        return load_draft(FAMILIES[family](Path(folder) / "draft"), _target(dtype), dtype)


@functools.cache
def _engine(family: str | None, batch_size: int, dtype: str) -> Engine:
    """One engine, warmed up, for all tests of a setting."""
    draft = None if family is None else _draft(family, dtype).module
    options = EngineOptions(max_seq_len=48, batch_size=batch_size, page_size=64, prefill_chunks=(4,), rounds_per_call=8)
    engine = Engine(_target(dtype).module, draft, options)
    engine.warmup(stream=False)
    return engine


def _completions(engine: Engine, **options: Any) -> list[Completion]:
    return engine.generate([request_for(prompt_ids=prompt, max_new_tokens=NEW_TOKENS, **options) for prompt in PROMPTS])


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


@pytest.mark.parametrize(
    ("family", "batch_size"),
    [
        *((family, 5) for family in FAMILIES if family not in VARIANTS),
        *(
            pytest.param(*setting, marks=pytest.mark.thorough)
            for setting in [*((family, 5) for family in VARIANTS), *ALONE_IN_FLOAT32]
        ),
    ],
)
def test_the_text_is_that_of_plain_decoding_and_nothing_is_compiled_on_the_way(family: str, batch_size: int) -> None:
    plain = _plain()
    engine = _engine(family, batch_size, "float32")
    with _no_compilation():
        completions = _completions(engine)
    assert [completion.output_ids for completion in completions] == plain
    rounds = [pair for completion in completions for pair in completion.rounds]
    assert any(accepted for _, accepted in rounds), "no draft was ever accepted: the identity says little"
    assert not any(completion.non_finite_rounds for completion in completions)


@pytest.mark.thorough
@pytest.mark.parametrize(("family", "batch_size"), IN_BFLOAT16)
def test_bfloat16_generates_without_compilation_too(family: str, batch_size: int) -> None:
    """Every family, with rows alone and together."""
    engine = _engine(family, batch_size, "bfloat16")
    with _no_compilation():
        completions = _completions(engine)
    assert [len(completion.output_ids) for completion in completions] == [NEW_TOKENS] * len(PROMPTS)
    assert not any(completion.non_finite_rounds for completion in completions)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("gemma4_text_12b_like", "B_deepspec_gemma4/unified_keqv_softcap"),
        ("gemma4_text_e2b_like", "H_compact/rnn"),
        ("gemma3_text", "H_compact/markov_sts"),
    ],
)
def test_gemma_targets_say_the_same_with_a_draft(target: str, draft: str, data_dir: Path) -> None:
    """Recorded checkpoints of equal sizes, with scaled embeddings and soft-capped heads in target and draft."""
    loaded = load_target(data_dir / "E_targets" / target, jnp.float32)
    module = load_draft(data_dir / draft, loaded, jnp.float32).module
    options = EngineOptions(max_seq_len=32, batch_size=5, page_size=64, prefill_chunks=(12,), rounds_per_call=8)
    requests = [request_for(prompt_ids=prompt, max_new_tokens=12) for prompt in PROMPTS]
    plain, speculative = (Engine(loaded.module, other, options).generate(requests) for other in (None, module))
    assert [completion.output_ids for completion in speculative] == [completion.output_ids for completion in plain]
    assert all(proposed >= 1 for completion in speculative for proposed, _ in completion.rounds)


@pytest.mark.parametrize(("family", "fewest"), [("deepspec gemma4", 0), ("compact", 1), ("compact, thresholds", 1)])
def test_each_draft_decides_itself_how_short_a_proposal_may_be(family: str, fewest: int) -> None:
    """At a threshold that no confidence reaches, a compact draft still proposes its first token. Other drafts propose
    nothing.
    """
    engine = _engine(family, 5, "float32")
    completions = _completions(engine, confidence_threshold=1.0)
    assert [completion.output_ids for completion in completions] == _plain()
    assert {proposed for completion in completions for proposed, _ in completion.rounds} == {fewest}


def test_stored_thresholds_cut_proposals_that_no_request_asked_to_cut() -> None:
    stored, none = (_completions(_engine(family, 5, "float32")) for family in ("compact, thresholds", "compact"))
    assert {proposed for completion in none for proposed, _ in completion.rounds} == {BLOCK}
    proposed = {proposed for completion in stored for proposed, _ in completion.rounds}
    assert 1 in proposed
    assert len(proposed) > 1
    with_wish = _completions(_engine("compact, thresholds", 5, "float32"), confidence_threshold=1e-6)
    assert {proposed for completion in with_wish for proposed, _ in completion.rounds} == {BLOCK}


def test_fewer_drafts_than_the_block_gives_can_be_asked_for() -> None:
    draft = _draft("compact, thresholds", "float32").module
    options = EngineOptions(
        num_speculative_tokens=2, max_seq_len=48, batch_size=5, page_size=64, prefill_chunks=(4,), rounds_per_call=8
    )
    completions = _completions(Engine(_target("float32").module, draft, options))
    assert [completion.output_ids for completion in completions] == _plain()
    assert {proposed for completion in completions for proposed, _ in completion.rounds} == {1, 2}


def test_what_was_loaded_is_what_the_files_say() -> None:
    """Family, number of drafts and tables of each draft."""
    found = {name: _draft(name, "float32") for name in FAMILIES}
    lines = {
        name: (draft.config.family, draft.config.max_drafts, draft.tables.embed_tokens, draft.tables.lm_head)
        for name, draft in found.items()
    }
    assert lines == {
        "speculators dspark, fill-in, borrowed tables": ("speculators_dspark", BLOCK - 1, "target", "target"),
        "speculators dspark, gated, pruned": ("speculators_dspark", BLOCK, "own", "own"),
        "deepspec qwen3": ("deepspec_qwen3", BLOCK, "own", "own"),
        "deepspec gemma4": ("deepspec_gemma4", BLOCK, "own", "own"),
        "deepspec gemma4, own values, rank 0": ("deepspec_gemma4", BLOCK, "own", "own"),
        "deepspec dflash": ("deepspec_qwen3", BLOCK, "own", "own"),
        "z-lab dflash": ("zlab_dflash", BLOCK - 1, "target", "target"),
        "speculators dflash, pruned": ("speculators_dflash", BLOCK - 1, "target", "own"),
        "compact": ("compact", BLOCK, "target", "target"),
        "compact, rnn": ("compact", BLOCK, "target", "target"),
        "compact, thresholds": ("compact", BLOCK, "target", "target"),
    }
