"""The demo pair in bfloat16, as a user runs it: the text of plain decoding, and programs that are compiled well.

A file of its own: beside the float32 pair it would take more memory than a worker may.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.pipelines.checkpoints.loading import LoadedTarget, load_draft, load_target
from dspark_jax.pipelines.speculative.engine import Engine, EngineOptions
from dspark_jax.pipelines.speculative.programs import Programs
from tests.support.hlo_text import whole_array_moves
from tests.support.requests import request_for
from tests.support.rounds import one_row_state

pytest.importorskip("gguf", reason="the demo target is a GGUF file")
pytestmark = [pytest.mark.smollm2, pytest.mark.thorough]

DRAFT = Path(__file__).parents[3] / "models" / "smollm2-135m-dspark"
RECORD: dict[str, Any] = json.loads((DRAFT / "expected.json").read_text())


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return load_target("smollm2", jnp.bfloat16)


def test_bfloat16_texts_are_those_of_plain_decoding(target: LoadedTarget) -> None:
    """Near-ties are common in bfloat16, so every verified row must equal the same row of a plain step bit for bit."""
    options = EngineOptions(max_seq_len=250, num_speculative_tokens=3)
    draft = load_draft(DRAFT, target, jnp.bfloat16).module
    requests = [
        request_for(
            prompt_ids=sample["prompt_ids"],
            max_new_tokens=RECORD["max_new_tokens"] + 1,
            stop_ids=(RECORD["stop_token"],),
        )
        for sample in RECORD["samples"][:2]
    ]
    speculative = Engine(target.module, draft, options).generate(requests)
    plain = Engine(target.module, None, dataclasses.replace(options, num_speculative_tokens=None)).generate(requests)
    assert [completion.output_ids for completion in speculative] == [completion.output_ids for completion in plain]


def test_the_programs_that_a_user_runs_move_no_cache_and_no_table(target: LoadedTarget) -> None:
    """Uses real sizes and all optimisations of XLA, because a compiler reorders large arrays only."""
    for draft in (load_draft(DRAFT, target, jnp.bfloat16).module, None):
        drafts = 0 if draft is None else draft.config.max_drafts
        programs = Programs(target.module, draft, num_speculative_tokens=drafts, page_size=64, max_rounds=4)
        state = one_row_state(target.module, draft, num_pages=7, page_size=64, pages_per_row=4)
        caches = jax.tree.leaves((state.target_pages, state.draft_pages))
        tables = [leaf for leaf in jax.tree.leaves((target.module, draft)) if leaf.ndim == 2]
        compiled = programs.lower_loop(state, num_pages=4).compile()
        assert compiled.memory_analysis().alias_size_in_bytes >= sum(pool.nbytes for pool in caches)
        assert whole_array_moves(compiled.as_text(), {array.shape for array in (*caches, *tables)}) == []
