"""The compiled programs of one (target, draft) pair: prompt chunk, mixed step, one round, many rounds.

Each is one XLA executable over a donated state. The modules' arrays are passed as flat leaves and the graph definition
is closed over, because that is the cheapest dispatch (`benchmarks/dispatch.py`). The number of programs is bounded: one
per kind, page bucket, token bucket, chunk bucket and policy.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Int32

from dspark_jax.architectures.protocols import Draft, Target
from dspark_jax.pipelines.sampling.logprobs import top_count
from dspark_jax.pipelines.sampling.policy import GREEDY, Policy
from dspark_jax.pipelines.sampling.rules import Rule
from dspark_jax.pipelines.sampling.token_masks import TokenMasks
from dspark_jax.pipelines.speculative.loop import LoopOutput, decode_loop
from dspark_jax.pipelines.speculative.state import PromptChunk, RoundOutput, RoundState, Rows, row_of, with_row
from dspark_jax.pipelines.speculative.step import Step, StepConfig, speculative_step


class Programs:
    """The jitted entry points. They donate `state`: only the returned state may be used afterwards.

    `num_pages` is the number of pages that attention reads of each row. `num_tokens` is the length of the flat batch,
    see `StepConfig`.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        *,
        num_speculative_tokens: int,
        page_size: int,
        max_rounds: int,
        rule: Rule | None = None,
    ) -> None:
        self.num_speculative_tokens = num_speculative_tokens if draft is not None else 0
        self.page_size, self.max_rounds, self.rule = page_size, max_rounds, rule
        self._num_logprobs = top_count(target.config.vocab_size)
        self._graphdef, modules = nnx.split((target, draft))
        leaves, self._treedef = jax.tree.flatten(modules)
        self._leaves = tuple(leaves)
        static = ("num_pages", "policy")
        self._round = jax.jit(self._round_program, donate_argnums=1, static_argnames=(*static, "num_tokens"))
        self._loop = jax.jit(self._loop_program, donate_argnums=1, static_argnames=(*static, "token_range"))
        self._mixed = jax.jit(self._mixed_program, donate_argnums=1, static_argnames=static)
        self._prefill = jax.jit(self._prefill_program, donate_argnums=1, static_argnames=static)
        self._admit = jax.jit(with_row)
        self._retire = jax.jit(_retire_program)

    def round(
        self,
        state: RoundState,
        *,
        num_pages: int,
        num_tokens: int | None = None,
        policy: Policy = GREEDY,
        masks: TokenMasks | None = None,
    ) -> tuple[RoundState, RoundOutput]:
        """One round of every live row."""
        return self._round(self._leaves, state, masks, num_pages=num_pages, num_tokens=num_tokens, policy=policy)

    def loop(
        self,
        state: RoundState,
        *,
        num_pages: int,
        token_range: range | None = None,
        until_any_finishes: bool,
        policy: Policy = GREEDY,
    ) -> tuple[RoundState, LoopOutput]:
        """Up to `max_rounds` rounds on the device.

        A round runs only if the total number of tokens of its rows is in `token_range`. The largest number of the range
        is the length of the flat batch; `None` means any number, and room for every draft. `policy` has no masks: only
        the host knows those of a second round.
        """
        assert not policy.masks
        until = jnp.asarray(until_any_finishes)
        return self._loop(self._leaves, state, until, num_pages=num_pages, token_range=token_range, policy=policy)

    def mixed(
        self,
        state: RoundState,
        chunk: PromptChunk,
        *,
        num_pages: int,
        policy: Policy = GREEDY,
        masks: TokenMasks | None = None,
    ) -> tuple[RoundState, RoundOutput]:
        """Prompt tokens of some rows and one round of the others."""
        return self._mixed(self._leaves, state, chunk, masks, num_pages=num_pages, policy=policy)

    def prefill(
        self,
        state: RoundState,
        row: int,
        tokens: Int32[Array, "C"],
        length: int,
        is_last: bool,
        *,
        num_pages: int,
        policy: Policy = GREEDY,
        masks: TokenMasks | None = None,
    ) -> tuple[RoundState, RoundOutput]:
        """`length` prompt tokens of one row, padded to a chunk bucket. The output and `masks` have one row."""
        scalars = (jnp.asarray(row, jnp.int32), jnp.asarray(length, jnp.int32), jnp.asarray(is_last))
        return self._prefill(self._leaves, state, tokens, *scalars, masks, num_pages=num_pages, policy=policy)

    def admit(self, state: RoundState, row: int, fresh: Rows) -> RoundState:
        """Replace row `row` by `fresh`, rows with B = 1, for a new request. Nothing of the former request is kept."""
        rows: Rows = self._admit(state.rows, jnp.asarray(row, jnp.int32), fresh)
        return dataclasses.replace(state, rows=rows)

    def retire(self, state: RoundState, retired: Bool[Array, "B"]) -> RoundState:
        """Make the rows inert for which `retired` is true."""
        rows = dataclasses.replace(state.rows, finished=self._retire(state.rows.finished, retired))
        return dataclasses.replace(state, rows=rows)

    def lower_round(self, state: RoundState, *, num_pages: int, platform: str | None = None) -> Any:
        """The lowered round, for inspection (`.compile().as_text()`).

        `platform` is what jax calls the platform to lower for: `cpu`, `tpu` or `cuda`; by default that of this process.
        Modules and state may hold shapes in place of arrays.
        """
        traced = self._round.trace(self._leaves, state, None, num_pages=num_pages, num_tokens=None, policy=GREEDY)
        return traced.lower(lowering_platforms=None if platform is None else (platform,))

    def lower_loop(self, state: RoundState, *, num_pages: int, platform: str | None = None) -> Any:
        """The lowered device loop, for inspection."""
        until: Any = jax.ShapeDtypeStruct((), jnp.bool_)
        traced = self._loop.trace(self._leaves, state, until, num_pages=num_pages, token_range=None, policy=GREEDY)
        return traced.lower(lowering_platforms=None if platform is None else (platform,))

    def _step(self, leaves: tuple[Array, ...], num_pages: int, policy: Policy, num_tokens: int | None = None) -> Step:
        target, draft = nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, leaves))
        config = StepConfig(
            num_speculative_tokens=self.num_speculative_tokens,
            num_pages=num_pages,
            num_tokens=num_tokens,
            policy=policy,
            rule=self.rule,
        )
        return speculative_step(target, draft, config)

    def _round_program(
        self,
        leaves: tuple[Array, ...],
        state: RoundState,
        masks: TokenMasks | None,
        *,
        num_pages: int,
        policy: Policy,
        num_tokens: int | None,
    ) -> tuple[RoundState, RoundOutput]:
        return self._step(leaves, num_pages, policy, num_tokens)(state, None, masks)

    def _loop_program(
        self,
        leaves: tuple[Array, ...],
        state: RoundState,
        until_any_finishes: Bool[Array, ""],
        *,
        num_pages: int,
        policy: Policy,
        token_range: range | None,
    ) -> tuple[RoundState, LoopOutput]:
        return decode_loop(
            self._step(leaves, num_pages, policy, None if token_range is None else token_range[-1]),
            state,
            max_rounds=self.max_rounds,
            last_position=num_pages * self.page_size - 1,
            until_any_finishes=until_any_finishes,
            token_range=token_range,
            num_logprobs=self._num_logprobs if policy.logprobs else None,
        )

    def _mixed_program(
        self,
        leaves: tuple[Array, ...],
        state: RoundState,
        chunk: PromptChunk,
        masks: TokenMasks | None,
        *,
        num_pages: int,
        policy: Policy,
    ) -> tuple[RoundState, RoundOutput]:
        return self._step(leaves, num_pages, policy)(state, chunk, masks)

    def _prefill_program(
        self,
        leaves: tuple[Array, ...],
        state: RoundState,
        tokens: Int32[Array, "C"],
        row: Int32[Array, ""],
        length: Int32[Array, ""],
        is_last: Bool[Array, ""],
        masks: TokenMasks | None,
        *,
        num_pages: int,
        policy: Policy,
    ) -> tuple[RoundState, RoundOutput]:
        """The step on one row of the state, so that the cost of a prompt does not depend on the batch size."""
        view = dataclasses.replace(state, rows=row_of(state.rows, row))
        chunk = PromptChunk(tokens=tokens, lengths=length[None], is_prompt=jnp.ones((1,), bool), is_last=is_last[None])
        view, output = self._step(leaves, num_pages, policy)(view, chunk, masks)
        return dataclasses.replace(view, rows=with_row(state.rows, row, view.rows)), output


def _retire_program(finished: Bool[Array, "B"], retired: Bool[Array, "B"]) -> Bool[Array, "B"]:
    return finished | retired
