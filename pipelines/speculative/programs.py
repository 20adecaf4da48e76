"""The compiled programs of one (target, draft) pair: prompt chunk, one round, many rounds.

Each is one XLA executable over a donated state. The modules' arrays go in as flat leaves with the graph definition
closed over: the cheapest dispatch there is (`docs/performance.md`). What is compiled is bounded: one program per kind,
page bucket and chunk bucket.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from dspark_jax.architectures.protocols import Draft, Target
from dspark_jax.pipelines.speculative.loop import LoopOutput, decode_loop
from dspark_jax.pipelines.speculative.state import PromptChunk, RoundOutput, RoundState
from dspark_jax.pipelines.speculative.step import Step, StepConfig, speculative_step

_ROW_FIELDS = (
    "page_table",
    "committed",
    "anchor",
    "drafts",
    "num_drafts",
    "remaining",
    "finished",
    "stop_ids",
    "confidence_threshold",
)


class Programs:
    """Jitted entry points. `state` arguments are donated: use the returned state, the old one is gone."""

    def __init__(
        self, target: Target, draft: Draft | None, *, num_speculative_tokens: int, page_size: int, max_rounds: int
    ) -> None:
        self.num_speculative_tokens = num_speculative_tokens if draft is not None else 0
        self.page_size, self.max_rounds = page_size, max_rounds
        self._graphdef, modules = nnx.split((target, draft))
        leaves, self._treedef = jax.tree.flatten(modules)
        self._leaves = tuple(leaves)
        self._round = self._jitted(self._round_program, ("num_pages",))
        self._loop = self._jitted(self._loop_program, ("num_pages",))
        self._prefill = self._jitted(self._prefill_program, ("num_pages",))
        self._admit = jax.jit(_admit_program)

    def round(self, state: RoundState, *, num_pages: int) -> tuple[RoundState, RoundOutput]:
        """One round of every live row, reading the first `num_pages` pages of each."""
        return self._round(self._leaves, state, num_pages=num_pages)

    def loop(self, state: RoundState, *, num_pages: int, until_any_finishes: bool) -> tuple[RoundState, LoopOutput]:
        """Up to `max_rounds` rounds on the device."""
        return self._loop(self._leaves, state, jnp.asarray(until_any_finishes), num_pages=num_pages)

    def prefill(
        self, state: RoundState, row: int, tokens: Int32[Array, "C"], length: int, is_last: bool, *, num_pages: int
    ) -> tuple[RoundState, RoundOutput]:
        """`length` prompt tokens of one row, padded to a chunk bucket. The output has one row."""
        scalars = (jnp.asarray(row, jnp.int32), jnp.asarray(length, jnp.int32), jnp.asarray(is_last))
        return self._prefill(self._leaves, state, tokens, *scalars, num_pages=num_pages)

    def admit(
        self,
        state: RoundState,
        row: int,
        *,
        pages: Int32[Array, "P"],
        budget: int,
        stop_ids: Int32[Array, "n"],
        confidence_threshold: float,
    ) -> RoundState:
        """Give a row to a new request: empty, live, with its pages, budget, stop ids and threshold. Nothing of its
        former use is left.
        """
        fields = {name: getattr(state, name) for name in _ROW_FIELDS}
        numbers = (
            jnp.asarray(row, jnp.int32),
            jnp.asarray(budget, jnp.int32),
            jnp.asarray(confidence_threshold, jnp.float32),
        )
        admitted: dict[str, Any] = self._admit(fields, pages, stop_ids, *numbers)
        return dataclasses.replace(state, **admitted)

    def lower_round(self, state: RoundState, *, num_pages: int) -> Any:
        """The lowered round, for inspection (`.compile().as_text()`)."""
        return self._round.lower(self._leaves, state, num_pages=num_pages)

    def lower_loop(self, state: RoundState, *, num_pages: int) -> Any:
        """The lowered device loop, for inspection."""
        return self._loop.lower(self._leaves, state, jnp.asarray(False), num_pages=num_pages)

    @staticmethod
    def _jitted(program: Callable[..., Any], static: tuple[str, ...]) -> Any:
        return jax.jit(program, donate_argnums=(1,), static_argnames=static)

    def _step(self, leaves: tuple[Array, ...], num_pages: int) -> Step:
        target, draft = nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, leaves))
        config = StepConfig(num_speculative_tokens=self.num_speculative_tokens, num_pages=num_pages)
        return speculative_step(target, draft, config)

    def _round_program(
        self, leaves: tuple[Array, ...], state: RoundState, *, num_pages: int
    ) -> tuple[RoundState, RoundOutput]:
        return self._step(leaves, num_pages)(state, None)

    def _loop_program(
        self, leaves: tuple[Array, ...], state: RoundState, until_any_finishes: Bool[Array, ""], *, num_pages: int
    ) -> tuple[RoundState, LoopOutput]:
        return decode_loop(
            self._step(leaves, num_pages),
            state,
            max_rounds=self.max_rounds,
            last_position=num_pages * self.page_size - 1,
            until_any_finishes=until_any_finishes,
        )

    def _prefill_program(
        self,
        leaves: tuple[Array, ...],
        state: RoundState,
        tokens: Int32[Array, "C"],
        row: Int32[Array, ""],
        length: Int32[Array, ""],
        is_last: Bool[Array, ""],
        *,
        num_pages: int,
    ) -> tuple[RoundState, RoundOutput]:
        """The step on a one-row view of the state, so that a prompt costs the same whatever the batch size."""
        row_fields: dict[str, Any] = {
            name: jax.lax.dynamic_slice_in_dim(getattr(state, name), row, 1) for name in _ROW_FIELDS
        }
        view = dataclasses.replace(state, **row_fields)
        chunk = PromptChunk(
            tokens=tokens[None], lengths=length[None], is_prompt=jnp.ones((1,), bool), is_last=is_last[None]
        )
        view, output = self._step(leaves, num_pages)(view, chunk)
        merge = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=row, axis=0)
        merged: dict[str, Any] = {name: merge(getattr(state, name), getattr(view, name)) for name in _ROW_FIELDS}
        return dataclasses.replace(view, **merged), output


def _admit_program(
    fields: dict[str, Array],
    pages: Int32[Array, "P"],
    stop_ids: Int32[Array, "n"],
    row: Int32[Array, ""],
    budget: Int32[Array, ""],
    confidence_threshold: Float[Array, ""],
) -> dict[str, Any]:
    fresh = {name: jnp.zeros_like(value[0]) for name, value in fields.items()}
    fresh |= {
        "page_table": pages,
        "stop_ids": stop_ids,
        "remaining": budget,
        "confidence_threshold": confidence_threshold,
    }
    return {name: value.at[row].set(fresh[name]) for name, value in fields.items()}
