"""The demo pair: the recorded float32 reference and plain decoding give the same text and acceptance; what a user runs
is compiled well.
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
from dspark_jax.pipelines.speculative.engine import Completion, Engine, EngineOptions
from dspark_jax.pipelines.speculative.programs import Programs
from tests.support.hlo_text import whole_array_moves
from tests.support.requests import request_for
from tests.support.rounds import one_row_state

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
def bfloat16_target() -> LoadedTarget:
    return load_target("smollm2", jnp.bfloat16)


@pytest.fixture(scope="module")
def completions(target: LoadedTarget) -> list[Completion]:
    return Engine(
        target.module, load_draft(DRAFT, target, jnp.float32).module, EngineOptions(max_seq_len=256)
    ).generate(REQUESTS)


@pytest.fixture(scope="module")
def plain(target: LoadedTarget) -> list[Completion]:
    """All requests beside each other: a row's text does not depend on its neighbours."""
    return Engine(target.module, None, EngineOptions(max_seq_len=256, batch_size=len(REQUESTS))).generate(REQUESTS)


@pytest.mark.parametrize("index", range(len(RECORD["samples"])))
def test_text_and_accepted_lengths_are_the_recorded_ones(completions: list[Completion], index: int) -> None:
    completion, sample = completions[index], RECORD["samples"][index]
    assert completion.output_ids[: len(sample["greedy_ids"])] == sample["greedy_ids"]
    lengths = [accepted + 1 for _, accepted in completion.rounds]
    if sum(lengths) != completion.committed:  # the last round ended in an accepted stop token
        lengths[-1] -= 1
    assert lengths == sample["accepted_lengths"]


@pytest.mark.parametrize("index", range(len(RECORD["samples"])))
def test_plain_decoding_gives_the_same_ids(completions: list[Completion], plain: list[Completion], index: int) -> None:
    assert plain[index].output_ids == completions[index].output_ids


def test_bfloat16_texts_are_those_of_plain_decoding(bfloat16_target: LoadedTarget) -> None:
    """Rounding makes near-ties common in bfloat16; every row of a round has to be the very row of a plain step."""
    target = bfloat16_target
    options = EngineOptions(max_seq_len=250, num_speculative_tokens=3)
    draft = load_draft(DRAFT, target, jnp.bfloat16).module
    requests = REQUESTS[:2]
    speculative = Engine(target.module, draft, options).generate(requests)
    plain = Engine(target.module, None, dataclasses.replace(options, num_speculative_tokens=None)).generate(requests)
    assert [completion.output_ids for completion in speculative] == [completion.output_ids for completion in plain]


def test_the_programs_that_a_user_runs_move_no_cache_and_no_table(bfloat16_target: LoadedTarget) -> None:
    """Real sizes and all of XLA's optimisations: it is the large arrays that a compiler likes to bring into another
    order.
    """
    target = bfloat16_target
    for draft in (load_draft(DRAFT, target, jnp.bfloat16).module, None):
        drafts = 0 if draft is None else draft.config.max_drafts
        programs = Programs(target.module, draft, num_speculative_tokens=drafts, page_size=64, max_rounds=4)
        state = one_row_state(target.module, draft, num_pages=7, page_size=64, pages_per_row=4)
        caches = jax.tree.leaves((state.target_pages, state.draft_pages))
        tables = [leaf for leaf in jax.tree.leaves((target.module, draft)) if leaf.ndim == 2]
        compiled = programs.lower_loop(state, num_pages=4).compile()
        assert compiled.memory_analysis().alias_size_in_bytes >= sum(pool.nbytes for pool in caches)
        assert whole_array_moves(compiled.as_text(), {array.shape for array in (*caches, *tables)}) == []
