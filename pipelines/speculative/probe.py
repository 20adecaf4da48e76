"""Times the compiled programs of an engine alone. Their cost depends on shapes only, so the rows need no prompts."""

from __future__ import annotations

import dataclasses
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.architectures.nn.attention.kv_cache import KVPages
from dspark_jax.pipelines.sampling.controls import Controls, request_controls
from dspark_jax.pipelines.sampling.generation import Generation
from dspark_jax.pipelines.sampling.policy import Policy
from dspark_jax.pipelines.speculative.programs import Programs
from dspark_jax.pipelines.speculative.sizes import EnginePlan
from dspark_jax.pipelines.speculative.state import RoundState, empty_rows

_NO_END = 1 << 20  # a budget in tokens that no probe reaches


class RoundTimes(NamedTuple):
    """`time.perf_counter` before one call of a compiled round, and when its results were ready."""

    entered: float
    ready: float


class ProgramProbe:
    """Runs an engine's device loop on rows that never finish, over its own caches filled with zeros.

    `num_verified` is the number of drafts that each row verifies in a round. With the programs of an engine without a
    draft model, a round verifies that many arbitrary tokens and drafts nothing; this times verification alone.
    `num_tokens` is the length of the flat batch, see `StepConfig`. `generation` states the controls of the rows.
    """

    def __init__(
        self,
        programs: Programs,
        plan: EnginePlan,
        *,
        num_rows: int,
        num_verified: int,
        num_tokens: int | None,
        generation: Generation,
    ) -> None:
        self.proposed = np.zeros((num_rows, 0), np.int32)  # drafts verified in each round of the last call, [B, R]
        self._programs, self._num_verified, self._num_tokens = programs, num_verified, num_tokens
        self._policy = Policy.of(generation)
        per_row = plan.page_buckets[-1]
        num_pages = num_rows * per_row
        sizes = dataclasses.replace(
            plan.row_sizes, pages_per_row=per_row, num_pages=num_pages, num_speculative_tokens=num_verified
        )
        rows = empty_rows(num_rows, sizes)
        table = np.arange(num_pages, dtype=np.int32).reshape(num_rows, per_row)
        self._state = RoundState(
            target_pages=KVPages.zeros(plan.target_params, num_pages),
            draft_pages=None if plan.draft_params is None else KVPages.zeros(plan.draft_params, num_pages),
            rows=dataclasses.replace(
                rows,
                page_table=jnp.asarray(table),
                confidence_threshold=jnp.full((num_rows,), generation.confidence_threshold, jnp.float32),
                controls=_controls(generation, num_rows, sizes.num_biased_ids),
            ),
        )

    def run_rounds(self, num_pages: int) -> tuple[float, int]:
        """Wall seconds of one call that reads `num_pages` pages of each row, and the number of rounds it ran."""
        return self._call(num_pages, live=True)

    def run_empty(self, num_pages: int) -> float:
        """Wall seconds of a call that runs no round, because every row is finished: the overhead of a call."""
        return self._call(num_pages, live=False)[0]

    def run_packed(self, num_pages: int, rounds: int) -> float:
        """Wall seconds of `rounds` calls of the one-round program with a flat batch of `num_tokens`. Drafts that do not
        fit into it are not verified.
        """
        state = self._ready(num_pages, live=True)
        started = time.perf_counter()
        for _ in range(rounds):
            state, output = self._programs.round(
                state, num_pages=num_pages, num_tokens=self._num_tokens, policy=self._policy
            )
        self._state = jax.block_until_ready(state)
        seconds = time.perf_counter() - started
        self.proposed = np.asarray(output.proposed)[:, None]
        return seconds

    def _call(self, num_pages: int, *, live: bool) -> tuple[float, int]:
        state = self._ready(num_pages, live=live)
        started = time.perf_counter()
        token_range = None if self._num_tokens is None else range(self._num_tokens + 1)
        self._state, output = self._programs.loop(
            state, num_pages=num_pages, token_range=token_range, until_any_finishes=False, policy=self._policy
        )
        jax.block_until_ready((self._state, output))
        seconds = time.perf_counter() - started
        self.proposed = np.asarray(output.proposed)
        return seconds, int(output.num_rounds[0])

    def _ready(self, num_pages: int, *, live: bool) -> RoundState:
        """The state before a call, waited for: a quarter of the positions is committed, and every draft is offered."""
        rows = self._state.rows
        num_rows, start = rows.num_rows, num_pages * self._programs.page_size // 4

        def full(value: int) -> jax.Array:
            return jnp.full((num_rows,), value, jnp.int32)

        rows = dataclasses.replace(
            rows,
            committed=full(start),
            remaining=full(_NO_END),
            proposal=rows.proposal._replace(length=full(self._num_verified)),
            finished=jnp.full((num_rows,), not live),
        )
        state: RoundState = jax.block_until_ready(dataclasses.replace(self._state, rows=rows))
        return state


def _controls(generation: Generation, num_rows: int, num_biased_ids: int) -> Controls:
    """The controls of `generation` for every row, each with random numbers of its own."""
    rows = [request_controls(generation, np.asarray([row, 0]), 0, num_biased_ids) for row in range(num_rows)]
    joined: Controls = jax.tree.map(lambda *leaves: jnp.asarray(np.concatenate(leaves)), *rows)
    return joined
