"""What changes between two rounds, and what a round reports. One donated pytree in, one out."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from dspark_jax.architectures.drafting.proposal import Proposal
from dspark_jax.architectures.nn.attention.kv_cache import KVPages

NO_TOKEN = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Everything that a batch knows of its rows. Every leaf leads with B: to slice, admit or reset a row nobody needs
    to know the fields (`row_of`, `with_row`).
    """

    page_table: Int32[Array, "B P"]  # page ids; the number of pages = unassigned
    committed: Int32[Array, "B"]  # P: positions 0..P-1 are final, their K/V and draft context are stored
    anchor: Int32[Array, "B"]  # newest token, at position P, not yet through the target
    proposal: Proposal  # drafts for P+1..P+k, and how many of them the next round verifies
    remaining: Int32[Array, "B"]  # tokens that the row may still emit
    finished: Bool[Array, "B"]  # stopped, out of budget, or unused: the row is inert
    stop_ids: Int32[Array, "B n"]  # NO_TOKEN where unused
    confidence_threshold: Float[Array, "B"]  # 0 = as the draft decides: every draft, or by thresholds stored with it

    @property
    def num_rows(self) -> int:
        """B."""
        return self.committed.shape[0]


def empty_rows(
    *, num_rows: int, pages_per_row: int, num_pages: int, num_speculative_tokens: int, num_stop_ids: int
) -> Rows:
    """Unused rows, each leaf a buffer of its own, as donation demands."""

    def zeros(*shape: int) -> Int32[Array, "..."]:
        return jnp.zeros(shape, jnp.int32)

    return Rows(
        page_table=jnp.full((num_rows, pages_per_row), num_pages, jnp.int32),
        committed=zeros(num_rows),
        anchor=zeros(num_rows),
        proposal=Proposal(zeros(num_rows, num_speculative_tokens), zeros(num_rows)),
        remaining=zeros(num_rows),
        finished=jnp.ones((num_rows,), bool),
        stop_ids=jnp.full((num_rows, num_stop_ids), NO_TOKEN, jnp.int32),
        confidence_threshold=jnp.zeros((num_rows,), jnp.float32),
    )


def row_of(rows: Rows, row: Int32[Array, ""]) -> Rows:
    """One row, as rows with B = 1."""
    one: Rows = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, row, 1), rows)
    return one


def with_row(rows: Rows, row: Int32[Array, ""], one: Rows) -> Rows:
    """`rows` with `one`, rows with B = 1, in the place of a row. Nothing of its former use is left."""
    merged: Rows = jax.tree.map(lambda leaf, new: jax.lax.dynamic_update_slice_in_dim(leaf, new, row, 0), rows, one)
    return merged


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundState:
    """A batch between two rounds.

    Both caches use one page table: position `s` of a row has the same page and slot in the target's pools and in the
    draft's.
    """

    target_pages: KVPages
    draft_pages: KVPages | None  # None when decoding without a draft
    rows: Rows


def empty_state(
    target_pages: KVPages,
    draft_pages: KVPages | None,
    *,
    num_rows: int,
    pages_per_row: int,
    num_speculative_tokens: int,
    num_stop_ids: int,
) -> RoundState:
    """A batch of unused rows over these pools."""
    rows = empty_rows(
        num_rows=num_rows,
        pages_per_row=pages_per_row,
        num_pages=target_pages.num_pages,
        num_speculative_tokens=num_speculative_tokens,
        num_stop_ids=num_stop_ids,
    )
    return RoundState(target_pages=target_pages, draft_pages=draft_pages, rows=rows)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundOutput:
    """What one round did, per row."""

    tokens: Int32[Array, "B verified"]  # 1 + k: emitted tokens, NO_TOKEN beyond num_tokens
    num_tokens: Int32[Array, "B"]  # after the cut at the first stop token and at the budget
    is_round: Bool[Array, "B"]  # a verification happened: prompt chunks and inert rows count in no statistic
    proposed: Int32[Array, "B"]  # drafts verified; cut at an accepted stop token, not at the budget
    accepted: Int32[Array, "B"]  # drafts accepted; same cuts
    next_length: Int32[Array, "B"]  # length of the proposal for the next round
    non_finite: Bool[Array, "B"]  # the draft's states overflowed: nothing was proposed for the next round


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptChunk:
    """The next prompt tokens of some rows, one row's after the other's; the other rows of the batch decode as usual.

    `lengths[b] = 0` and `is_prompt[b]` leaves row b inert in this step.
    """

    tokens: Int32[Array, "C"]
    lengths: Int32[Array, "B"]  # they add up to at most C
    is_prompt: Bool[Array, "B"]
    is_last: Bool[Array, "B"]  # the prompt ends with this chunk: the row emits its first token
