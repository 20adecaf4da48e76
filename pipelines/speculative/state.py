"""The state that a round takes and returns as one donated pytree, and what a round reports."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from dspark_jax.architectures.nn.attention.kv_cache import KVPages
from dspark_jax.architectures.proposal import Proposal
from dspark_jax.pipelines.sampling.controls import Controls, neutral_controls
from dspark_jax.pipelines.sampling.logprobs import Logprobs

NO_TOKEN = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """All per-row state of a batch.

    B is the first axis of every leaf, so that `row_of` and `with_row` read and replace a row without naming the fields.
    """

    page_table: Int32[Array, "B P"]  # page ids; num_pages where no page is assigned
    committed: Int32[Array, "B"]  # P: positions 0..P-1 are final, their K/V and draft context are stored
    anchor: Int32[Array, "B"]  # newest token, at position P, not yet through the target
    proposal: Proposal  # drafts for P+1..P+k, and how many of them the next round verifies
    remaining: Int32[Array, "B"]  # tokens that the row may still emit
    finished: Bool[Array, "B"]  # stopped, out of budget, or unused: the row is inert
    stop_ids: Int32[Array, "B n"]  # NO_TOKEN where unused
    confidence_threshold: Float[Array, "B"]  # 0 = the draft decides: all drafts, or its own stored thresholds
    controls: Controls
    history: Int32[Array, "B S"]  # token at each position; kept only by rounds that edit logits

    @property
    def num_rows(self) -> int:
        """B."""
        return self.committed.shape[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSizes:
    """The sizes of the arrays in `Rows`, except the number of rows."""

    pages_per_row: int
    num_pages: int
    page_size: int
    num_speculative_tokens: int
    num_stop_ids: int
    num_biased_ids: int = 1
    draft_vocab_size: int | None = None  # Vd where drafts are sampled; None where they are the argmax


def empty_rows(num_rows: int, sizes: RowSizes) -> Rows:
    """Unused rows. Each leaf is a separate buffer, which donation needs."""

    def zeros(*shape: int) -> Int32[Array, "..."]:
        return jnp.zeros(shape, jnp.int32)

    drafts, draft_vocab_size = sizes.num_speculative_tokens, sizes.draft_vocab_size
    proposal = Proposal(zeros(num_rows, drafts), zeros(num_rows))
    if draft_vocab_size is not None:
        proposal = proposal._replace(
            probabilities=jnp.zeros((num_rows, drafts, draft_vocab_size), jnp.float32),
            token_probabilities=jnp.zeros((num_rows, drafts), jnp.float32),
        )

    return Rows(
        page_table=jnp.full((num_rows, sizes.pages_per_row), sizes.num_pages, jnp.int32),
        committed=zeros(num_rows),
        anchor=zeros(num_rows),
        proposal=proposal,
        remaining=zeros(num_rows),
        finished=jnp.ones((num_rows,), bool),
        stop_ids=jnp.full((num_rows, sizes.num_stop_ids), NO_TOKEN, jnp.int32),
        confidence_threshold=jnp.zeros((num_rows,), jnp.float32),
        controls=neutral_controls(num_rows, sizes.num_biased_ids),
        history=jnp.full((num_rows, sizes.pages_per_row * sizes.page_size), NO_TOKEN, jnp.int32),
    )


def row_of(rows: Rows, row: Int32[Array, ""]) -> Rows:
    """One row, as rows with B = 1."""
    one: Rows = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, row, 1), rows)
    return one


def with_row(rows: Rows, row: Int32[Array, ""], one: Rows) -> Rows:
    """`rows` with row `row` replaced by `one`, rows with B = 1."""
    merged: Rows = jax.tree.map(lambda leaf, new: jax.lax.dynamic_update_slice_in_dim(leaf, new, row, 0), rows, one)
    return merged


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundState:
    """A batch between two rounds.

    Both caches use the same page table: position `s` of a row has the same page id and offset in both.
    """

    target_pages: KVPages
    draft_pages: KVPages | None  # None when decoding without a draft
    rows: Rows


def empty_state(target_pages: KVPages, draft_pages: KVPages | None, num_rows: int, sizes: RowSizes) -> RoundState:
    """A batch of unused rows over these pages."""
    return RoundState(target_pages=target_pages, draft_pages=draft_pages, rows=empty_rows(num_rows, sizes))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundOutput:
    """What one round did, per row. Prompt chunks report here too, with `is_round` false."""

    tokens: Int32[Array, "B verified"]  # 1 + k: emitted tokens, NO_TOKEN beyond num_tokens
    num_tokens: Int32[Array, "B"]  # after the cut at the first stop token and at the budget
    is_round: Bool[Array, "B"]  # the row verified; false for prompt chunks and inert rows
    proposed: Int32[Array, "B"]  # drafts verified, up to an accepted stop token; not cut at the budget
    accepted: Int32[Array, "B"]  # drafts accepted, cut likewise
    next_length: Int32[Array, "B"]  # length of the proposal for the next round
    non_finite: Bool[Array, "B"]  # the draft's states were not finite: nothing was proposed for the next round
    logprobs: Logprobs | None = None  # of `tokens`; None where the policy has none
    drafts: Int32[Array, "B drafts"] | None = None  # of the next round; None where the policy has no masks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptChunk:
    """The next prompt tokens of some rows, concatenated in the order of the rows; the other rows decode.

    A row with `is_prompt[b]` and `lengths[b] = 0` is inert in this step.
    """

    tokens: Int32[Array, "C"]
    lengths: Int32[Array, "B"]  # tokens of each row, at most C in all
    is_prompt: Bool[Array, "B"]
    is_last: Bool[Array, "B"]  # the prompt ends with this chunk: the row emits its first token
