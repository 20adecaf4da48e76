"""Many rounds in one device loop: the offline driver. Stop tokens and budgets are handled in the round itself."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from dspark_jax.pipelines.speculative.state import NO_TOKEN, RoundOutput, RoundState
from dspark_jax.pipelines.speculative.step import Step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopOutput:
    """Everything that up to R rounds reported, packed per row."""

    tokens: Int32[Array, "B N"]  # NO_TOKEN beyond num_tokens
    num_tokens: Int32[Array, "B"]
    proposed: Int32[Array, "B R"]  # one entry per round of the row, NO_TOKEN beyond num_rounds
    accepted: Int32[Array, "B R"]
    num_rounds: Int32[Array, "B"]
    non_finite: Int32[Array, "B"]


def decode_loop(
    step: Step, state: RoundState, *, max_rounds: int, last_position: int, until_any_finishes: Bool[Array, ""]
) -> tuple[RoundState, LoopOutput]:
    """Run `step` until every row is finished, `max_rounds` are done, or a live row's next verification would pass
    `last_position`.

    With `until_any_finishes` the loop also ends when a row that was live at the start finishes, so that a waiting
    request can take its place.
    """
    live_at_start = ~state.finished
    width = state.drafts.shape[1] + 1

    def goes_on(carry: tuple[Int32[Array, ""], RoundState, LoopOutput]) -> Bool[Array, ""]:
        rounds, state, _ = carry
        live = ~state.finished
        deepest = jnp.max(jnp.where(live, state.committed, 0)) + width - 1
        waits = until_any_finishes & jnp.any(live_at_start & state.finished)
        return (rounds < max_rounds) & jnp.any(live) & (deepest <= last_position) & ~waits

    def body(carry: tuple[Int32[Array, ""], RoundState, LoopOutput]) -> tuple[Int32[Array, ""], RoundState, LoopOutput]:
        rounds, state, done = carry
        state, output = step(state, None)
        return rounds + 1, state, _append(done, output)

    start = (jnp.zeros((), jnp.int32), state, _nothing_yet(state, max_rounds, width))
    _, state, done = jax.lax.while_loop(goes_on, body, start)
    return state, done


def _nothing_yet(state: RoundState, max_rounds: int, width: int) -> LoopOutput:
    rows = state.num_rows
    return LoopOutput(
        tokens=jnp.full((rows, max_rounds * width), NO_TOKEN, jnp.int32),
        num_tokens=jnp.zeros((rows,), jnp.int32),
        proposed=jnp.full((rows, max_rounds), NO_TOKEN, jnp.int32),
        accepted=jnp.full((rows, max_rounds), NO_TOKEN, jnp.int32),
        num_rounds=jnp.zeros((rows,), jnp.int32),
        non_finite=jnp.zeros((rows,), jnp.int32),
    )


def _append(done: LoopOutput, output: RoundOutput) -> LoopOutput:
    rows = jnp.arange(output.num_tokens.shape[0], dtype=jnp.int32)
    place = done.num_tokens[:, None] + jnp.arange(output.tokens.shape[1], dtype=jnp.int32)[None, :]
    nowhere = done.tokens.shape[1]
    place = jnp.where(output.tokens == NO_TOKEN, nowhere, place)
    round_place = jnp.where(output.is_round, done.num_rounds, done.proposed.shape[1])
    return LoopOutput(
        tokens=done.tokens.at[rows[:, None], place].set(output.tokens, mode="drop"),
        num_tokens=done.num_tokens + output.num_tokens,
        proposed=done.proposed.at[rows, round_place].set(output.proposed, mode="drop"),
        accepted=done.accepted.at[rows, round_place].set(output.accepted, mode="drop"),
        num_rounds=done.num_rounds + output.is_round.astype(jnp.int32),
        non_finite=done.non_finite + output.non_finite.astype(jnp.int32),
    )
