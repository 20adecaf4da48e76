"""One round as a pure function: verify, decide, commit, context K/V, draft block, Markov chain, confidence cut.

`speculative_step(target, draft, config)` closes over the modules and returns `(state, chunk) -> (state, output)`. It
can be traced inside any jitted function, because it needs no host. Without a draft it is plain decoding. With a
`PromptChunk` some rows take prompt tokens instead of verifying drafts: such a row commits its tokens and, at the end of
its prompt, drafts its first block in the same step.

The target sees the tokens of all rows in one flat axis of static length, `StepConfig.num_tokens`. If that is less than
all anchors and drafts need, proposals are shortened until they fit. This can lower tau but never changes the text.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from dspark_jax.architectures.drafting.taps import tapped_forward
from dspark_jax.architectures.nn.attention.kv_cache import KVCache, KVPages
from dspark_jax.architectures.nn.attention.ragged_batch import PADDING_POSITION, RaggedBatch
from dspark_jax.architectures.proposal import Proposal
from dspark_jax.architectures.protocols import Draft, Target
from dspark_jax.pipelines.sampling.draft_sampler import DraftSampler
from dspark_jax.pipelines.sampling.logprobs import logprobs_of
from dspark_jax.pipelines.sampling.policy import GREEDY, Policy
from dspark_jax.pipelines.sampling.rules import Rule
from dspark_jax.pipelines.sampling.token_masks import TokenMasks
from dspark_jax.pipelines.speculative.acceptance import Verdict, VerifyLogits, cut_emission, decide
from dspark_jax.pipelines.speculative.state import NO_TOKEN, PromptChunk, RoundOutput, RoundState, Rows
from dspark_jax.speculators_common.numerics.argmax import argmax


@runtime_checkable
class Step(Protocol):
    """One round. `masks` are needed if the policy has masks, and say nothing otherwise."""

    def __call__(
        self, state: RoundState, chunk: PromptChunk | None = None, masks: TokenMasks | None = None
    ) -> tuple[RoundState, RoundOutput]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Static settings of a round. A program is compiled for each combination of values."""

    num_speculative_tokens: int  # k: drafts per round
    num_pages: int  # pages that attention reads of each row: positions below num_pages * page_size
    num_tokens: int | None = None  # length of the flat batch; None = room for every token that the rows can have
    policy: Policy = GREEDY  # the controls that the rows use; greedy decoding pays for none
    rule: Rule | None = None  # in place of exact acceptance


def speculative_step(target: Target, draft: Draft | None, config: StepConfig) -> Step:
    """The function of one round for this pair. With `draft` `None` it is plain decoding."""

    def step(
        state: RoundState, chunk: PromptChunk | None = None, masks: TokenMasks | None = None
    ) -> tuple[RoundState, RoundOutput]:
        work = _work(state.rows, chunk, config, masks)
        if config.policy.edits:
            rows = dataclasses.replace(state.rows, history=_with_tokens(state.rows.history, work.batch))
            state = dataclasses.replace(state, rows=rows)
        with jax.named_scope("verify"):
            logits, taps, target_pages = _verify(target, draft, state, work, config)
        with jax.named_scope("accept"):
            exact_argmax = functools.partial(argmax, form=state.target_pages.platform.argmax)
            draft_ids = None if draft is None else draft.target_ids
            allowed = None if masks is None else jnp.asarray(masks.words)
            verdict = decide(
                work.proposal, logits, state.rows, config.policy, exact_argmax, draft_ids, config.rule, allowed
            )
            rows, output, kept = _commit(state.rows, work, verdict)
            if config.policy.logprobs:
                output = dataclasses.replace(output, logprobs=logprobs_of(logits.flat, logits.index, output.tokens))
        state = RoundState(target_pages=target_pages, draft_pages=state.draft_pages, rows=rows)
        if draft is not None:
            with jax.named_scope("draft"):
                state, non_finite = _draft(target, draft, state, work.batch.keep(kept), taps, config)
            output = dataclasses.replace(output, next_length=state.rows.proposal.length, non_finite=non_finite)
        if config.policy.masks:
            output = dataclasses.replace(output, drafts=state.rows.proposal.tokens)
        return state, output

    return step


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Work:
    """The tokens that the rows run in this step."""

    batch: RaggedBatch  # `[anchor, drafts]` of decode rows, prompt tokens of prompt rows, at P and after
    proposal: Proposal  # the drafts to verify; length 0 for rows that verify none
    is_prompt: Bool[Array, "B"]
    is_last: Bool[Array, "B"]  # the row's prompt ends in this step
    prompt_lengths: Int32[Array, "B"]  # 0 for decode rows
    has_chunk: bool


def _work(rows: Rows, chunk: PromptChunk | None, config: StepConfig, masks: TokenMasks | None) -> _Work:
    nothing = jnp.zeros_like(rows.finished)
    is_prompt, is_last = (nothing, nothing) if chunk is None else (chunk.is_prompt, chunk.is_prompt & chunk.is_last)
    prompt_lengths = jnp.zeros_like(rows.committed) if chunk is None else jnp.where(is_prompt, chunk.lengths, 0)
    offered = jnp.where(is_prompt | rows.finished, 0, rows.proposal.length)
    if masks is not None:
        offered = jnp.minimum(offered, masks.lengths)
    decodes = ~is_prompt & ~rows.finished
    length, num_tokens = offered, _num_tokens(rows, chunk)
    if config.num_tokens is not None and config.num_tokens < num_tokens:
        num_tokens = config.num_tokens
        free = num_tokens - jnp.sum(prompt_lengths) - jnp.sum(decodes, dtype=jnp.int32)
        length = _fitted(offered, rows.proposal.tokens.shape[1], free)
    proposal = rows.proposal._replace(length=length)
    lengths = jnp.where(decodes, 1 + length, prompt_lengths)
    return _Work(
        batch=_batch(rows, chunk, lengths, num_tokens),
        proposal=proposal,
        is_prompt=is_prompt,
        is_last=is_last,
        prompt_lengths=prompt_lengths,
        has_chunk=chunk is not None,
    )


def _num_tokens(rows: Rows, chunk: PromptChunk | None) -> int:
    """The most tokens that the rows can have: anchor and drafts of every row, and a full chunk. A single row either
    decodes or takes prompt tokens.
    """
    decoding = rows.num_rows * (1 + rows.proposal.tokens.shape[1])
    if chunk is None:
        return decoding
    given = chunk.tokens.shape[0]
    return max(decoding, given) if rows.num_rows == 1 else decoding + given


def _fitted(offered: Int32[Array, "B"], num_slots: int, free: Int32[Array, ""]) -> Int32[Array, "B"]:
    """Proposal lengths, cut to `free` drafts in all. The first drafts of all rows come before any second draft."""
    slots = jnp.arange(num_slots, dtype=jnp.int32)[:, None]
    is_offered = slots < offered[None, :]
    rank = jnp.cumsum(is_offered.reshape(-1).astype(jnp.int32)).reshape(is_offered.shape)
    return jnp.sum(is_offered & (rank <= free), axis=0, dtype=jnp.int32)


def _batch(rows: Rows, chunk: PromptChunk | None, lengths: Int32[Array, "B"], num_tokens: int) -> RaggedBatch:
    decoding = jnp.concatenate([rows.anchor[:, None], rows.proposal.tokens], axis=1)
    if chunk is None and num_tokens == decoding.size:
        return _rectangle(rows, decoding, lengths)
    if rows.num_rows == 1:
        assert chunk is not None
        width = max(num_tokens, decoding.shape[1])
        given = jnp.pad(chunk.tokens, (0, width - chunk.tokens.shape[0]))[None]
        tokens = jnp.where(chunk.is_prompt[:, None], given, jnp.pad(decoding, ((0, 0), (0, width - decoding.shape[1]))))
        return _rectangle(rows, tokens, lengths)

    def token_of(row: Int32[Array, "T"], index: Int32[Array, "T"]) -> Int32[Array, "T"]:
        own = decoding[row, jnp.clip(index, 0, decoding.shape[1] - 1)]
        if chunk is None:
            return own
        start = jnp.cumsum(chunk.lengths, dtype=jnp.int32) - chunk.lengths
        given = chunk.tokens[jnp.clip(start[row] + index, 0, chunk.tokens.shape[0] - 1)]
        return jnp.where(chunk.is_prompt[row], given, own)

    widest = max(decoding.shape[1], 0 if chunk is None else chunk.tokens.shape[0])
    return RaggedBatch.packed(lengths, rows.committed, token_of, num_tokens=num_tokens, row_width=widest)


def _rectangle(rows: Rows, tokens: Int32[Array, "B L"], lengths: Int32[Array, "B"]) -> RaggedBatch:
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    positions = jnp.where(index < lengths[:, None], rows.committed[:, None] + index, PADDING_POSITION)
    return RaggedBatch.rectangle(tokens, positions)


def _verify(
    target: Target, draft: Draft | None, state: RoundState, work: _Work, config: StepConfig
) -> tuple[VerifyLogits, Float[Array, "T mH"], KVPages]:
    """Run the target: its logits per row (of prompt rows only after the last prompt token), its taps and its pages."""
    rows, batch = state.rows, work.batch
    cache = KVCache(pages=state.target_pages, page_table=rows.page_table[:, : config.num_pages], lengths=rows.committed)
    hidden, taps, cache = tapped_forward(target, batch, cache, () if draft is None else draft.config.taps)
    width = 1 + rows.proposal.tokens.shape[1]
    slots = jnp.arange(width, dtype=jnp.int32)[None, :]
    last = jnp.where(work.is_prompt[:, None], jnp.maximum(work.prompt_lengths - 1, 0)[:, None], slots)
    index = jnp.minimum(batch.row_offsets[:-1, None] + last, hidden.shape[0] - 1)
    row_of_token, positions = batch.row_of_token, batch.positions
    if work.has_chunk:  # of a prompt only the last token needs logits
        hidden = hidden[index].reshape(rows.num_rows * width, hidden.shape[1])
        row_of_token, positions = row_of_token[index].reshape(-1), positions[index].reshape(-1)
        index = jnp.arange(index.size, dtype=jnp.int32).reshape(index.shape)
    logits = VerifyLogits(flat=target.compute_logits(hidden), index=index, rows=row_of_token, positions=positions + 1)
    return logits, taps, cache.pages


def _with_tokens(history: Int32[Array, "B S"], batch: RaggedBatch) -> Int32[Array, "B S"]:
    """The history with the tokens of the batch, drafts included, at their positions."""
    position = jnp.where(batch.positions == PADDING_POSITION, history.shape[1], batch.positions)
    return history.at[batch.row_of_token, position].set(batch.tokens, mode="drop")


def _commit(rows: Rows, work: _Work, verdict: Verdict) -> tuple[Rows, RoundOutput, Int32[Array, "B"]]:
    """Emit tokens and advance P. Also returns how many of each row's batch tokens become draft context."""
    is_round = ~work.is_prompt & ~rows.finished
    emits = is_round | work.is_last
    budget = jnp.where(emits, rows.remaining, 0)
    emission = cut_emission(work.proposal.tokens, verdict, rows.stop_ids, budget, NO_TOKEN)
    kept = jnp.where(work.is_prompt, work.prompt_lengths, emission.num_tokens)
    remaining = rows.remaining - emission.num_tokens
    output = RoundOutput(
        tokens=emission.tokens,
        num_tokens=emission.num_tokens,
        is_round=is_round,
        proposed=_cut_at_stop(work.proposal.length, verdict, emission.num_tokens, emission.stopped),
        accepted=_cut_at_stop(verdict.accepted, verdict, emission.num_tokens, emission.stopped),
        next_length=jnp.zeros_like(rows.committed),
        non_finite=jnp.zeros_like(is_round),
    )
    rows = dataclasses.replace(
        rows,
        committed=rows.committed + kept,
        anchor=jnp.where(emits & (emission.num_tokens > 0), emission.last_token, rows.anchor),
        remaining=remaining,
        finished=rows.finished | (emits & (emission.stopped | (remaining <= 0))),
    )
    return rows, output, kept


def _cut_at_stop(
    length: Int32[Array, "B"], verdict: Verdict, num_tokens: Int32[Array, "B"], stopped: Bool[Array, "B"]
) -> Int32[Array, "B"]:
    """`length`, cut at a stop token among the accepted drafts. A stop token that is the next token cuts nothing."""
    return jnp.where(stopped & (num_tokens <= verdict.accepted), num_tokens, length)


def _draft(
    target: Target, draft: Draft, state: RoundState, batch: RaggedBatch, taps: Float[Array, "T mH"], config: StepConfig
) -> tuple[RoundState, Bool[Array, "B"]]:
    """Store the context K/V of the committed tokens, then draft the next block from the new anchor."""
    assert state.draft_pages is not None
    rows = state.rows
    table = rows.page_table[:, : config.num_pages]
    cache = KVCache(pages=state.draft_pages, page_table=table, lengths=rows.committed)
    context = draft.project_target_hidden(taps)
    cache = draft.materialize_kv(context, batch, cache)
    num_slots = config.num_speculative_tokens + (0 if draft.config.sample_from_anchor else 1)
    hidden = draft.forward_block(draft.embed_block(rows.anchor, target), cache, num_slots)
    base_logits = draft.compute_logits(hidden, target)
    if config.policy.samples and rows.proposal.probabilities is not None:
        sampler = DraftSampler(rows.controls, rows.committed, base_logits.shape[1], cache.pages.platform.argmax)
        found = draft.propose(hidden, base_logits, rows.anchor, rows.confidence_threshold, sampler)
        proposal = sampler.completed(found)
    else:
        found = draft.propose(hidden, base_logits, rows.anchor, rows.confidence_threshold)
        proposal = rows.proposal._replace(tokens=found.tokens, length=found.length, finite=found.finite)
    context_is_finite = jnp.all(jnp.isfinite(context), axis=-1) | (batch.positions == PADDING_POSITION)
    finite = jnp.all(jnp.isfinite(hidden), axis=(1, 2)) & batch.all_in_row(context_is_finite)
    if proposal.finite is not None:
        finite = finite & proposal.finite
    free_positions = rows.page_table.shape[1] * cache.pages.page_size - 1 - rows.committed
    length = jnp.minimum(proposal.length, jnp.maximum(free_positions, 0))
    proposal = proposal._replace(length=jnp.where(finite, length, 0), finite=None)
    rows = dataclasses.replace(rows, proposal=proposal)
    return dataclasses.replace(state, draft_pages=cache.pages, rows=rows), ~finite & ~rows.finished
