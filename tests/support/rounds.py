"""Runs `speculative_step` from the host, for tests that inspect the state between two rounds.

Every step uses one program, a step with a prompt chunk, which is empty if all rows decode. Pairs of equal structure
share programs, whatever their weights. Nothing is donated, so every state stays readable.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.architectures.nn.attention.kv_cache import KVPages
from dspark_jax.architectures.protocols import Draft, Target
from dspark_jax.pipelines.speculative.state import (
    NO_TOKEN,
    PromptChunk,
    RoundOutput,
    RoundState,
    Rows,
    RowSizes,
    empty_state,
)
from dspark_jax.pipelines.speculative.step import StepConfig, speculative_step

NUM_STOP_IDS = 4


@functools.cache
def _compiled(graphdef: Any, treedef: Any, config: StepConfig) -> Any:
    def run(leaves: list[Any], state: RoundState, chunk: PromptChunk | None) -> tuple[RoundState, RoundOutput]:
        target, draft = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
        return speculative_step(target, draft, config)(state, chunk)

    return jax.jit(run)


class Rounds:
    """A batch of rows. Row b has the pages from `b * pages_per_row` on, unless `admit` gets other ones."""

    def __init__(
        self, target: Any, draft: Any, *, num_rows: int = 1, width: int = 8, page_size: int = 8, pages_per_row: int = 6
    ) -> None:
        self.width, self.num_speculative_tokens = width, 0 if draft is None else draft.config.max_drafts
        self.num_rows, self.page_size, self.pages_per_row = num_rows, page_size, pages_per_row
        graphdef, modules = nnx.split((target, draft))
        self._leaves, treedef = jax.tree.flatten(modules)
        config = StepConfig(num_speculative_tokens=self.num_speculative_tokens, num_pages=pages_per_row)
        self._run = _compiled(graphdef, treedef, config)
        num_pages = num_rows * pages_per_row
        self.state = empty_state(
            KVPages.zeros(target.kv_params(page_size), num_pages),
            None if draft is None else KVPages.zeros(draft.kv_params(page_size), num_pages),
            num_rows,
            RowSizes(
                pages_per_row=pages_per_row,
                num_pages=num_pages,
                page_size=page_size,
                num_speculative_tokens=self.num_speculative_tokens,
                num_stop_ids=NUM_STOP_IDS,
            ),
        )

    @property
    def rows(self) -> Rows:
        """The rows of the state."""
        return self.state.rows

    def change_rows(self, **changes: Any) -> None:
        """Replace fields of the rows."""
        self.state = dataclasses.replace(self.state, rows=dataclasses.replace(self.rows, **changes))

    def admit(
        self,
        row: int,
        *,
        budget: int = 10**6,
        stop_ids: Sequence[int] = (),
        threshold: float = 0.0,
        pages: Sequence[int] | None = None,
    ) -> None:
        """Make `row` an empty live row."""
        own = range(row * self.pages_per_row, (row + 1) * self.pages_per_row)
        stops = [*stop_ids, *[NO_TOKEN] * (NUM_STOP_IDS - len(stop_ids))]
        rows = self.rows
        self.change_rows(
            page_table=rows.page_table.at[row].set(jnp.asarray(own if pages is None else pages, jnp.int32)),
            committed=rows.committed.at[row].set(0),
            proposal=jax.tree.map(lambda leaf: leaf.at[row].set(0), rows.proposal),
            remaining=rows.remaining.at[row].set(budget),
            finished=rows.finished.at[row].set(False),
            stop_ids=rows.stop_ids.at[row].set(jnp.asarray(stops, jnp.int32)),
            confidence_threshold=rows.confidence_threshold.at[row].set(threshold),
        )

    def feed(
        self, parts: Mapping[int, Sequence[int]], *, last: Collection[int] | None = None, padding_id: int = 0
    ) -> RoundOutput:
        """One step in which the rows of `parts` take these prompt tokens (none to `width`) while the others decode.

        The prompts of the rows in `last`, by default all of them, end here. The output's arrays are on the host.
        """
        tokens = np.full((self.num_rows * self.width,), padding_id, np.int32)
        lengths, is_prompt, is_last = (
            np.zeros(self.num_rows, np.int32),
            np.zeros(self.num_rows, bool),
            np.zeros(self.num_rows, bool),
        )
        for row, ids in parts.items():
            lengths[row], is_prompt[row] = len(ids), True
            is_last[row] = last is None or row in last
        given = [token for row in sorted(parts) for token in parts[row]]
        tokens[: len(given)] = given
        chunk = PromptChunk(
            tokens=jnp.asarray(tokens),
            lengths=jnp.asarray(lengths),
            is_prompt=jnp.asarray(is_prompt),
            is_last=jnp.asarray(is_last),
        )
        return self._step(chunk)

    def step(self) -> RoundOutput:
        """One round of all rows."""
        return self.feed({})

    def step_without_chunk(self) -> RoundOutput:
        """The same by the program for decoding alone."""
        return self._step(None)

    def _step(self, chunk: PromptChunk | None) -> RoundOutput:
        self.state, output = self._run(self._leaves, self.state, chunk)
        host: RoundOutput = jax.device_get(output)
        return host

    def prefill(self, prompts: Mapping[int, Sequence[int]], *, padding_id: int = 0) -> dict[int, int]:
        """Feed whole prompts in equal chunks; rows whose prompt is done wait. Returns the first tokens."""
        first: dict[int, int] = {}
        for start in range(0, max(map(len, prompts.values())), self.width):
            parts = {row: prompt[start : start + self.width] for row, prompt in prompts.items()}
            last = [row for row, prompt in prompts.items() if start < len(prompt) <= start + self.width]
            output = self.feed(parts, last=last, padding_id=padding_id)
            first |= {row: int(output.tokens[row, 0]) for row in last}
        return first

    def start(self, row: int, prompt: Sequence[int], **admission: Any) -> int:
        """`admit` and `prefill` of one row; returns the first token."""
        self.admit(row, **admission)
        return self.prefill({row: prompt})[row]

    def context(self, pages: KVPages, row: int) -> list[np.ndarray]:
        """Keys and values of all layers that `row` has stored for its committed positions, each `[K, P, hd]`."""
        table, committed = self.rows.page_table[row : row + 1], int(self.rows.committed[row])
        stored = [pages.read(layer, table) for layer in range(len(pages.layers))]
        return [np.asarray(heads[0, :, :committed]) for part in zip(*stored, strict=True) for heads in part]


def emitted(outputs: Sequence[RoundOutput], row: int = 0) -> list[int]:
    """The tokens that `row` emitted over several steps."""
    return [int(token) for output in outputs for token in output.tokens[row, : output.num_tokens[row]]]


def accepted(outputs: Sequence[RoundOutput], row: int = 0) -> list[int]:
    """Accepted drafts of every round of `row`."""
    return [int(output.accepted[row]) for output in outputs if output.is_round[row]]


def one_row_state(
    target: Target, draft: Draft | None, num_pages: int, page_size: int, pages_per_row: int
) -> RoundState:
    """An empty state of one row for the programs of a pair, or of a target alone."""
    return empty_state(
        KVPages.zeros(target.kv_params(page_size), num_pages),
        None if draft is None else KVPages.zeros(draft.kv_params(page_size), num_pages),
        1,
        RowSizes(
            pages_per_row=pages_per_row,
            num_pages=num_pages,
            page_size=page_size,
            num_speculative_tokens=0 if draft is None else draft.config.max_drafts,
            num_stop_ids=2,
        ),
    )
