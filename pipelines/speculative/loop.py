"""The offline driver: many rounds in one loop on the device. The round itself handles stop tokens and budgets."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Shaped

from dspark_jax.pipelines.sampling.logprobs import Logprobs, empty_logprobs
from dspark_jax.pipelines.speculative.state import NO_TOKEN, RoundOutput, RoundState, Rows
from dspark_jax.pipelines.speculative.step import Step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopOutput:
    """What up to R rounds reported. The tokens of a row are stored without gaps between the rounds."""

    tokens: Int32[Array, "B N"]  # NO_TOKEN beyond num_tokens
    num_tokens: Int32[Array, "B"]
    proposed: Int32[Array, "B R"]  # one entry per round of the row, NO_TOKEN beyond num_rounds
    accepted: Int32[Array, "B R"]
    num_rounds: Int32[Array, "B"]
    next_length: Int32[Array, "B"]  # length of the proposal for the next round
    non_finite: Int32[Array, "B"]  # rounds after which the draft's states were not finite
    logprobs: Logprobs | None = None  # of `tokens`


def decode_loop(
    step: Step,
    state: RoundState,
    *,
    max_rounds: int,
    last_position: int,
    until_any_finishes: Bool[Array, ""],
    token_range: range | None = None,
    num_logprobs: int | None = None,
) -> tuple[RoundState, LoopOutput]:
    """Run `step` until every row is finished, `max_rounds` rounds are done, or the next verification of a live row
    would write beyond `last_position` or beyond the row's last page.

    With `until_any_finishes` the loop also ends when a row that was live at the start finishes, so that a waiting
    request can take its place. With `token_range` it ends before a round whose total number of tokens, over all rows,
    is outside the range: another program, with a flat batch of another length, runs that round. `num_logprobs` is the
    number of most probable tokens that a round reports; `None` if it reports no log-probabilities.
    """
    live_at_start = ~state.rows.finished
    num_speculative_tokens = state.rows.proposal.tokens.shape[1]
    end = jnp.minimum(_end_of_pages(state), last_position + 1)

    def continues(carry: tuple[Int32[Array, ""], Rows, LoopOutput]) -> Bool[Array, ""]:
        rounds, rows, _ = carry
        live = ~rows.finished
        in_reach = jnp.all(~live | (rows.committed + num_speculative_tokens < end))
        must_return = until_any_finishes & jnp.any(live_at_start & rows.finished)
        is_possible = (rounds < max_rounds) & jnp.any(live) & in_reach & ~must_return
        if token_range is None:
            return is_possible
        num_tokens = jnp.sum(jnp.where(live, 1 + rows.proposal.length, 0))
        return is_possible & (num_tokens >= token_range.start) & (num_tokens < token_range.stop)

    def body(
        carry: tuple[Int32[Array, ""], RoundState, LoopOutput],
    ) -> tuple[Int32[Array, ""], RoundState, LoopOutput]:
        rounds, state, done = carry
        state, output = step(state, None)
        return rounds + 1, state, _append(done, output)

    empty = _empty_output(state.rows.num_rows, max_rounds, num_speculative_tokens + 1, num_logprobs)
    start = (jnp.zeros((), jnp.int32), state, empty)
    _, state, done = jax.lax.while_loop(lambda carry: continues((carry[0], carry[1].rows, carry[2])), body, start)
    return state, dataclasses.replace(done, next_length=state.rows.proposal.length)


def _end_of_pages(state: RoundState) -> Int32[Array, "B"]:
    """The first position of each row that has no page."""
    pages = state.target_pages
    assigned = jnp.sum(state.rows.page_table < pages.num_pages, axis=1, dtype=jnp.int32)
    return assigned * pages.page_size


def _empty_output(num_rows: int, max_rounds: int, width: int, num_logprobs: int | None) -> LoopOutput:
    def zeros() -> Int32[Array, "B"]:
        return jnp.zeros((num_rows,), jnp.int32)

    return LoopOutput(
        tokens=jnp.full((num_rows, max_rounds * width), NO_TOKEN, jnp.int32),
        num_tokens=zeros(),
        proposed=jnp.full((num_rows, max_rounds), NO_TOKEN, jnp.int32),
        accepted=jnp.full((num_rows, max_rounds), NO_TOKEN, jnp.int32),
        num_rounds=zeros(),
        next_length=zeros(),
        non_finite=zeros(),
        logprobs=None if num_logprobs is None else empty_logprobs(num_rows, max_rounds * width, num_logprobs),
    )


def _append(done: LoopOutput, output: RoundOutput) -> LoopOutput:
    rows = jnp.arange(output.num_tokens.shape[0], dtype=jnp.int32)
    index = done.num_tokens[:, None] + jnp.arange(output.tokens.shape[1], dtype=jnp.int32)[None, :]
    # An index beyond the end is dropped.
    index = jnp.where(output.tokens == NO_TOKEN, done.tokens.shape[1], index)
    round_index = jnp.where(output.is_round, done.num_rounds, done.proposed.shape[1])

    def added(stored: Shaped[Array, "B N *axes"], new: Shaped[Array, "B verified *axes"]) -> Shaped[Array, "B N *axes"]:
        return stored.at[rows[:, None], index].set(new, mode="drop")

    return LoopOutput(
        tokens=added(done.tokens, output.tokens),
        num_tokens=done.num_tokens + output.num_tokens,
        proposed=done.proposed.at[rows, round_index].set(output.proposed, mode="drop"),
        accepted=done.accepted.at[rows, round_index].set(output.accepted, mode="drop"),
        num_rounds=done.num_rounds + output.is_round.astype(jnp.int32),
        next_length=done.next_length,
        non_finite=done.non_finite + output.non_finite.astype(jnp.int32),
        logprobs=jax.tree.map(added, done.logprobs, output.logprobs),
    )
