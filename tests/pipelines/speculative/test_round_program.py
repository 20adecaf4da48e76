"""Properties of the compiled programs: one executable per kind, state updated in place, no host calls, no copies of
whole caches or tables, no recompilation.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.pipelines.speculative.engine import Engine, EngineOptions
from dspark_jax.pipelines.speculative.programs import Programs
from dspark_jax.pipelines.speculative.state import RoundState
from tests.support.compilation import quick_compilation
from tests.support.hlo_text import Shape, host_calls, instructions, whole_array_moves
from tests.support.random_pairs import VOCAB, random_draft, random_prompts, random_target
from tests.support.requests import request_for
from tests.support.rounds import one_row_state
from tests.support.tiny_checkpoints import load_pair

# Sizes that no other array of these programs has.
NUM_PAGES, PAGE_SIZE, PAGES_PER_ROW = 11, 16, 3
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Some programs of one pair and dtype, by kind, with their state."""

    target: Any
    draft: Any
    state: RoundState
    plain_state: RoundState
    executables: dict[str, Any]

    def pool_shapes(self) -> set[Shape]:
        assert self.state.draft_pages is not None
        pages = (self.state.target_pages, self.state.draft_pages)
        return {pool.shape for pool in jax.tree.leaves(pages)}

    def table_shapes(self) -> set[Shape]:
        """Every array with an axis of the vocabulary: embeddings, heads, W1 and W2."""
        leaves = jax.tree.leaves((self.target, self.draft))
        return {leaf.shape for leaf in leaves if leaf.ndim == 2 and VOCAB in leaf.shape}


@pytest.fixture(scope="module", params=DTYPES)
def compiled(request: pytest.FixtureRequest) -> Compiled:
    target, draft = load_pair(random_target(), random_draft(markov_rank=6), dtype=DTYPES[request.param])
    sizes: dict[str, Any] = {"page_size": PAGE_SIZE, "max_rounds": 4}
    programs = Programs(target, draft, num_speculative_tokens=draft.config.max_drafts, **sizes)
    plain = Programs(target, None, num_speculative_tokens=0, **sizes)
    state, plain_state = (
        one_row_state(target, module, NUM_PAGES, PAGE_SIZE, PAGES_PER_ROW) for module in (draft, None)
    )
    lowered = {
        "round": programs.lower_round(state, num_pages=PAGES_PER_ROW),
        "loop": programs.lower_loop(state, num_pages=PAGES_PER_ROW),
        "plain step": plain.lower_round(plain_state, num_pages=PAGES_PER_ROW),
    }
    return Compiled(target, draft, state, plain_state, {kind: one.compile() for kind, one in lowered.items()})


KINDS = pytest.mark.parametrize("kind", ["round", "loop", "plain step"])


@KINDS
def test_the_state_is_updated_in_place(compiled: Compiled, kind: str) -> None:
    executable = compiled.executables[kind]
    state = compiled.plain_state if kind == "plain step" else compiled.state
    caches = jax.tree.leaves((state.target_pages, state.draft_pages))
    assert executable.memory_analysis().alias_size_in_bytes >= sum(pool.nbytes for pool in caches)
    assert "input_output_alias" in executable.as_text()


@KINDS
def test_nothing_leaves_the_device(compiled: Compiled, kind: str) -> None:
    assert host_calls(compiled.executables[kind].as_text()) == []


@KINDS
def test_no_whole_cache_and_no_whole_table_is_copied_or_converted(compiled: Compiled, kind: str) -> None:
    shapes = compiled.pool_shapes() | compiled.table_shapes()
    assert {(NUM_PAGES, 2, PAGE_SIZE, 8), (VOCAB, 32), (VOCAB, 24), (VOCAB, 6)} <= {
        *shapes,
        *(shape[::-1] for shape in compiled.table_shapes()),
    }
    assert whole_array_moves(compiled.executables[kind].as_text(), shapes) == []


def test_the_round_does_all_its_work_in_one_executable(compiled: Compiled) -> None:
    """The device loop has the round as its body: both contain the matrix products of target and draft."""
    products = {
        kind: sum(opcode == "dot" or "matmul" in line for opcode, line, _ in instructions(executable.as_text()))
        for kind, executable in compiled.executables.items()
    }
    assert products["round"] > products["plain step"] > 0
    assert products["loop"] >= products["round"]
    assert any(opcode == "while" for opcode, _, _ in instructions(compiled.executables["loop"].as_text()))


def test_the_check_finds_a_cache_that_is_converted_and_one_that_is_not_donated() -> None:
    """Controls that fail with every version of XLA. Whether a naive bfloat16 update converts the cache depends on the
    version.
    """
    pool = jnp.zeros((NUM_PAGES, 2, PAGE_SIZE, 8), jnp.bfloat16)
    converted: Any = jax.jit(lambda pool: pool.astype(jnp.float32)).lower(pool).compile()
    assert whole_array_moves(converted.as_text(), {pool.shape}) != []
    kept: Any = jax.jit(lambda pool: pool.at[0].set(jnp.zeros_like(pool[0]))).lower(pool.astype(jnp.float32)).compile()
    assert whole_array_moves(kept.as_text(), {pool.shape}) != []
    assert kept.memory_analysis().alias_size_in_bytes == 0


def test_the_check_finds_a_host_callback() -> None:
    def talks(x: Any) -> Any:
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    compiled: Any = jax.jit(talks).lower(jnp.ones(3)).compile()
    assert host_calls(compiled.as_text()) != []


@quick_compilation()
def test_a_ragged_workload_compiles_nothing_after_warmup() -> None:
    """More than 100 steps with both drivers: arrivals, cancellations, prompts of every length, thresholds, stop tokens,
    and an abandoned run.
    """
    jax.clear_caches()  # what other tests compiled must not serve here
    options = EngineOptions(
        batch_size=3, max_seq_len=40, page_size=8, num_pages=12, prefill_chunks=(3, 8), rounds_per_call=4
    )
    engine = Engine(*load_pair(random_target(), random_draft(markov_rank=6)), options)
    assert engine.warmup() == 7  # two prompt chunks, a mixed step, both drivers, packed and full
    compilations = _count_compilations()
    steps = 0
    for stream in (True, False, True):
        requests = [
            request_for(prompt_ids=prompt, max_new_tokens=budget, stop_ids=stops, confidence_threshold=threshold)
            for prompt, (budget, stops, threshold) in zip(
                random_prompts(12, seed=stream + 11),
                itertools.product((3, 17), ((), (5, 9), (7,)), (0.0, 0.6)),
                strict=True,
            )
        ]
        completions = engine.generate(requests, stream=stream)
        steps += sum(len(completion.rounds) + -(-len(completion.request.prompt_ids) // 8) for completion in completions)
    running: Any = engine.run(requests)
    next(running)
    running.close()
    engine.generate(requests[:2])
    assert steps > 100
    assert compilations == []


def test_the_counter_sees_a_compilation() -> None:
    compilations = _count_compilations()
    jax.jit(lambda x: x * 3 + 1)(jnp.ones((7, 3)))
    assert compilations != []


def _count_compilations() -> list[str]:
    """A list that grows with every later compilation of XLA."""
    seen: list[str] = []

    def listen(event: str, duration_secs: float, **details: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return seen
