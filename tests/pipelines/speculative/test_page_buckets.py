"""Requests that grow beyond a page bucket: text and proposals do not depend on the bucket of a round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.pipelines.checkpoints.loading import LoadedDraft, LoadedTarget, load_draft, load_target
from dspark_jax.pipelines.speculative.engine import Completion, Engine, EngineOptions, Request
from tests.support.requests import request_for

BUCKET = 256  # positions of the smallest bucket
NEW_TOKENS = 12

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def pair(data_dir: Path) -> tuple[LoadedTarget, LoadedDraft]:
    target = load_target(data_dir / "D_loop" / "target", jnp.float32)
    return target, load_draft(data_dir / "D_loop" / "draft", target, jnp.float32)


def _requests() -> list[Request]:
    """Prompts that end just before, at and after the edge of a bucket, and one far beyond it."""
    ids = np.random.default_rng(5).integers(0, 198, size=400).tolist()
    return [
        request_for(prompt_ids=tuple(ids[:length]), max_new_tokens=NEW_TOKENS)
        for length in (BUCKET - 8, BUCKET - 3, BUCKET, BUCKET + 2, 390)
    ]


def _run(
    pair: tuple[LoadedTarget, LoadedDraft], *, draft: bool = True, stream: bool = False, **options: Any
) -> list[Completion]:
    engine = Engine(pair[0].module, pair[1].module if draft else None, EngineOptions(max_seq_len=420, **options))
    assert len(engine.plan.page_buckets) == 2
    return engine.generate(_requests(), stream=stream)


@pytest.fixture(scope="module")
def plain(pair: tuple[LoadedTarget, LoadedDraft]) -> list[list[int]]:
    return [completion.output_ids for completion in _run(pair, draft=False, prefill_chunks=(256,))]


@pytest.mark.parametrize(
    ("stream", "options"),
    [
        pytest.param(True, {"prefill_chunks": (100,)}, id="one round a call, odd chunks"),
        pytest.param(False, {}, id="device loop", marks=pytest.mark.thorough),
        pytest.param(
            False,
            {"batch_size": 2, "prefill_chunks": (256,)},
            id="beside a row in the larger bucket",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_every_round_at_the_edge_proposes_the_whole_block(
    pair: tuple[LoadedTarget, LoadedDraft], plain: list[list[int]], stream: bool, options: dict[str, Any]
) -> None:
    completions = _run(pair, stream=stream, **options)
    assert [completion.output_ids for completion in completions] == plain
    proposed = {proposed for completion in completions for proposed, _ in completion.rounds}
    assert proposed == {pair[1].config.max_drafts}
