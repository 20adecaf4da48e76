"""The device side of an engine: holds the donated state and starts programs, with host values as arrays."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.architectures.nn.attention.kv_cache import KVPages
from dspark_jax.architectures.protocols import Draft, Target
from dspark_jax.pipelines.sampling.controls import request_controls
from dspark_jax.pipelines.sampling.policy import GREEDY
from dspark_jax.pipelines.sampling.token_masks import TokenMasks, token_masks
from dspark_jax.pipelines.speculative.loop import LoopOutput
from dspark_jax.pipelines.speculative.probe import RoundTimes
from dspark_jax.pipelines.speculative.programs import Programs
from dspark_jax.pipelines.speculative.scheduler import Job
from dspark_jax.pipelines.speculative.sizes import EnginePlan
from dspark_jax.pipelines.speculative.state import (
    NO_TOKEN,
    PromptChunk,
    RoundOutput,
    RoundState,
    Rows,
    empty_rows,
    empty_state,
)


class Runner:
    """Runs the programs of one pair on one state. Calls return before the device is done, except where they say so.

    `masks` of a program are used if the policy has masks. Without them every token is allowed.
    """

    def __init__(self, target: Target, draft: Draft | None, plan: EnginePlan) -> None:
        self.plan = plan
        options = plan.options
        self.programs = Programs(
            target,
            draft,
            num_speculative_tokens=plan.num_speculative_tokens,
            page_size=options.page_size,
            max_rounds=options.rounds_per_call,
            rule=options.acceptance,
        )
        self._state: RoundState | None = self._empty_state()
        self._times: list[RoundTimes] | None = None
        self._table: np.ndarray | None = None  # the page table on the device; None if not known
        self.policy = GREEDY  # of the programs that are started next

    def admit(self, row: int, job: Job) -> None:
        """Make the row live for `job`, with nothing stored and without pages."""
        self._table = None
        self._state = self.programs.admit(self._donated(), row, self._fresh(job))

    def retire(self, rows: Sequence[int]) -> None:
        """Make rows inert."""
        retired = np.zeros((self.plan.options.batch_size,), bool)
        retired[list(rows)] = True
        self._state = self.programs.retire(self._donated(), jnp.asarray(retired))

    def set_pages(self, pages: Mapping[int, Sequence[int]]) -> None:
        """Set the page table: row -> its pages. Rows that are not named get none."""
        table = np.full((self.plan.options.batch_size, self.plan.pages_per_row), self.plan.num_pages, np.int32)
        for row, owned in pages.items():
            table[row, : len(owned)] = owned
        if self._table is not None and np.array_equal(table, self._table):
            return
        self._table = table
        state = self._donated()
        self._state = dataclasses.replace(state, rows=dataclasses.replace(state.rows, page_table=jnp.asarray(table)))

    def prefill(
        self,
        row: int,
        ids: Sequence[int],
        *,
        width: int,
        is_last: bool,
        num_pages: int,
        masks: TokenMasks | None = None,
    ) -> RoundOutput:
        """Feed prompt tokens to one row alone, padded to `width`. `masks` have one row."""
        tokens = np.zeros((width,), np.int32)
        tokens[: len(ids)] = ids
        self._state, output = self.programs.prefill(
            self._donated(),
            row,
            jnp.asarray(tokens),
            len(ids),
            is_last,
            num_pages=num_pages,
            policy=self.policy,
            masks=self._on_device(masks, 1),
        )
        return output

    def mixed(
        self,
        parts: Mapping[int, Sequence[int]],
        *,
        last: Sequence[int],
        width: int,
        num_pages: int,
        masks: TokenMasks | None = None,
    ) -> RoundOutput:
        """Feed the prompt tokens `parts` (row -> ids), at most `width` in all, while the other rows decode one round.

        `last` are the rows whose prompt ends with this chunk.
        """
        rows = self.plan.options.batch_size
        tokens, lengths = np.zeros((width,), np.int32), np.zeros((rows,), np.int32)
        is_prompt, is_last = np.zeros((rows,), bool), np.zeros((rows,), bool)
        for row, ids in parts.items():
            lengths[row], is_prompt[row], is_last[row] = len(ids), True, row in last
        given = [token for row in sorted(parts) for token in parts[row]]
        tokens[: len(given)] = given
        chunk = PromptChunk(
            tokens=jnp.asarray(tokens),
            lengths=jnp.asarray(lengths),
            is_prompt=jnp.asarray(is_prompt),
            is_last=jnp.asarray(is_last),
        )
        self._state, output = self.programs.mixed(
            self._donated(), chunk, num_pages=num_pages, policy=self.policy, masks=self._on_device(masks, rows)
        )
        return output

    def round(self, *, num_pages: int, num_tokens: int, masks: TokenMasks | None = None) -> RoundOutput:
        """One round of all live rows."""
        entered = time.perf_counter()
        self._state, output = self.programs.round(
            self._donated(),
            num_pages=num_pages,
            num_tokens=self._bucket(num_tokens),
            policy=self.policy,
            masks=self._on_device(masks, self.plan.options.batch_size),
        )
        if self._times is not None:
            jax.block_until_ready((self._state, output))
            self._times.append(RoundTimes(entered, time.perf_counter()))
        return output

    @contextlib.contextmanager
    def timing_rounds(self) -> Iterator[list[RoundTimes]]:
        """While the context is open, `round` waits for its results and appends its times to the list."""
        times: list[RoundTimes] = []
        self._times = times
        try:
            yield times
        finally:
            self._times = None

    def loop(self, *, num_pages: int, num_tokens: int, until_any_finishes: bool) -> LoopOutput:
        """Many rounds of all live rows."""
        self._state, output = self.programs.loop(
            self._donated(),
            num_pages=num_pages,
            token_range=self.plan.tokens_of_bucket(num_tokens),
            until_any_finishes=until_any_finishes,
            policy=self.policy,
        )
        return output

    @property
    def num_cache_bytes(self) -> int:
        """Bytes of the pages of both caches."""
        assert self._state is not None
        return sum(pool.nbytes for pool in jax.tree.leaves((self._state.target_pages, self._state.draft_pages)))

    def wait(self) -> None:
        """Wait until the device has finished all started programs."""
        jax.block_until_ready(self._state)

    def _on_device(self, masks: TokenMasks | None, num_rows: int) -> TokenMasks | None:
        if not self.policy.masks:
            return None
        if masks is None:
            masks = token_masks(
                {}, num_rows=num_rows, width=self.plan.tokens_per_round, vocab_size=self.plan.vocab_size
            )
        return TokenMasks(jnp.asarray(masks.words), jnp.asarray(masks.lengths))

    def _bucket(self, num_tokens: int) -> int | None:
        """`StepConfig.num_tokens`: `None` for the longest bucket, where no packing is needed."""
        return None if num_tokens >= self.plan.token_buckets[-1] else num_tokens

    def _fresh(self, job: Job) -> Rows:
        request = job.request
        rows = empty_rows(1, self.plan.row_sizes)
        stops = [*request.stop_ids, *[NO_TOKEN] * (self.plan.options.max_stop_ids - len(request.stop_ids))]
        return dataclasses.replace(
            rows,
            remaining=jnp.asarray([job.remaining], jnp.int32),
            finished=jnp.zeros((1,), bool),
            stop_ids=jnp.asarray([stops], jnp.int32),
            confidence_threshold=jnp.asarray([request.generation.confidence_threshold], jnp.float32),
            controls=request_controls(
                request.generation, job.seed_words, len(request.prompt_ids), self.plan.options.max_biased_ids
            ),
        )

    def _empty_state(self) -> RoundState:
        plan = self.plan
        return empty_state(
            KVPages.zeros(plan.target_params, plan.num_pages),
            None if plan.draft_params is None else KVPages.zeros(plan.draft_params, plan.num_pages),
            plan.options.batch_size,
            plan.row_sizes,
        )

    def _donated(self) -> RoundState:
        """The state, to be donated to a program. If the last program failed, its donated state is lost: then the state
        starts empty.
        """
        if self._state is None:
            self._state = self._empty_state()
        state, self._state = self._state, None
        return state
