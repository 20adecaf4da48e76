"""What changes between two rounds, and what a round reports. One donated pytree in, one out."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from dspark_jax.architectures.nn.attention.kv_cache import KVPages

NO_TOKEN = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundState:
    """All rows of a batch between two rounds.

    Both caches use one page table: position `s` of a row has the same page and slot in the target's pools and in the
    draft's.
    """

    target_pages: KVPages
    draft_pages: KVPages | None  # None when decoding without a draft
    page_table: Int32[Array, "B P"]  # page ids; the number of pages = unassigned
    committed: Int32[Array, "B"]  # P: positions 0..P-1 are final, their K/V and draft context are stored
    anchor: Int32[Array, "B"]  # newest token, at position P, not yet through the target
    drafts: Int32[Array, "B k"]  # proposals for P+1..P+k, target ids
    num_drafts: Int32[Array, "B"]  # how many of them the next round verifies
    remaining: Int32[Array, "B"]  # tokens that the row may still emit
    finished: Bool[Array, "B"]  # stopped, out of budget, or unused: the row is inert
    stop_ids: Int32[Array, "B n"]  # NO_TOKEN where unused
    confidence_threshold: Float[Array, "B"]  # 0 = as the draft decides: every draft, or by thresholds stored with it

    @property
    def num_rows(self) -> int:
        """B."""
        return self.committed.shape[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundOutput:
    """What one round did, per row."""

    tokens: Int32[Array, "B verified"]  # 1 + k: emitted tokens, NO_TOKEN beyond num_tokens
    num_tokens: Int32[Array, "B"]  # after the cut at the first stop token and at the budget
    is_round: Bool[Array, "B"]  # a verification happened: prompt chunks and inert rows count in no statistic
    proposed: Int32[Array, "B"]  # drafts verified; cut at an accepted stop token, not at the budget
    accepted: Int32[Array, "B"]  # drafts accepted; same cuts
    non_finite: Bool[Array, "B"]  # the draft's states overflowed: nothing was proposed for the next round


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptChunk:
    """The next prompt tokens of some rows; the other rows of the batch decode as usual.

    `lengths[b] = 0` and `is_prompt[b]` leaves row b inert in this step.
    """

    tokens: Int32[Array, "B C"]
    lengths: Int32[Array, "B"]
    is_prompt: Bool[Array, "B"]
    is_last: Bool[Array, "B"]  # the prompt ends with this chunk: the row emits its first token


def empty_state(
    target_pages: KVPages,
    draft_pages: KVPages | None,
    *,
    num_rows: int,
    pages_per_row: int,
    num_drafts: int,
    num_stop_ids: int,
) -> RoundState:
    """A batch of unused rows. Every leaf is a buffer of its own, as donation demands."""
    num_pages = target_pages.num_pages

    def zeros(*shape: int) -> Int32[Array, "..."]:
        return jnp.zeros(shape, jnp.int32)

    return RoundState(
        target_pages=target_pages,
        draft_pages=draft_pages,
        page_table=jnp.full((num_rows, pages_per_row), num_pages, jnp.int32),
        committed=zeros(num_rows),
        anchor=zeros(num_rows),
        drafts=zeros(num_rows, num_drafts),
        num_drafts=zeros(num_rows),
        remaining=zeros(num_rows),
        finished=jnp.ones((num_rows,), bool),
        stop_ids=jnp.full((num_rows, num_stop_ids), NO_TOKEN, jnp.int32),
        confidence_threshold=jnp.zeros((num_rows,), jnp.float32),
    )
