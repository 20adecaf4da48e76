"""One round as a pure function: verify, accept, commit, context K/V, draft block, Markov chain, confidence cut.

`speculative_step(target, draft, config)` closes over the modules and returns `(state, chunk) -> (state, output)`. Trace
it inside your own jitted function: nothing here leaves the device. Without a draft the same function is plain decoding.
With a `PromptChunk` some rows take prompt tokens instead of a verification; a prompt row commits its tokens and, at the
prompt's end, drafts its first block in the same step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from dspark_jax.architectures.drafting.taps import tapped_forward
from dspark_jax.architectures.nn.attention.kv_cache import KVCache, KVPages
from dspark_jax.architectures.nn.attention.ragged_batch import PADDING_POSITION, RaggedBatch
from dspark_jax.architectures.protocols import Draft, Target
from dspark_jax.pipelines.speculative.acceptance import Verdict, accept_greedy, cut_emission
from dspark_jax.pipelines.speculative.state import NO_TOKEN, PromptChunk, RoundOutput, RoundState
from dspark_jax.speculators_common.numerics.argmax import argmax

Step = Callable[[RoundState, PromptChunk | None], tuple[RoundState, RoundOutput]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Static choices of a round; each is part of the compiled program's identity."""

    num_speculative_tokens: int  # k: drafts asked for per round; the draft always runs its trained width
    num_pages: int  # page-table columns that attention reads: positions below num_pages * page_size


def speculative_step(target: Target, draft: Draft | None, config: StepConfig) -> Step:
    """The round for this pair. A draft of `None` gives plain greedy decoding."""

    def step(state: RoundState, chunk: PromptChunk | None = None) -> tuple[RoundState, RoundOutput]:
        batch, is_prompt = _batch(state, chunk)
        with jax.named_scope("verify"):
            choices, taps, target_pages = _verify(target, draft, state, batch, chunk, config)
        with jax.named_scope("accept"):
            state, output, kept = _commit(state, chunk, choices, is_prompt)
        state = dataclasses.replace(state, target_pages=target_pages)
        if draft is None:
            return state, output
        with jax.named_scope("draft"):
            state, non_finite = _propose(target, draft, state, batch.keep(kept), taps, config)
        return state, dataclasses.replace(output, non_finite=non_finite)

    return step


def _batch(state: RoundState, chunk: PromptChunk | None) -> tuple[RaggedBatch, Bool[Array, "B"]]:
    """Tokens `[anchor, drafts]` of decode rows and prompt tokens of prompt rows, from position P on."""
    tokens = jnp.concatenate([state.anchor[:, None], state.drafts], axis=1)
    lengths = jnp.where(state.finished, 0, 1 + state.num_drafts)
    width = max(tokens.shape[1], 0 if chunk is None else chunk.tokens.shape[1])
    tokens = jnp.pad(tokens, ((0, 0), (0, width - tokens.shape[1])))
    is_prompt = jnp.zeros((state.num_rows,), bool)
    if chunk is not None:
        is_prompt = chunk.is_prompt
        given = jnp.pad(chunk.tokens, ((0, 0), (0, width - chunk.tokens.shape[1])))
        tokens = jnp.where(is_prompt[:, None], given, tokens)
        lengths = jnp.where(is_prompt, chunk.lengths, lengths)
    index = jnp.arange(width, dtype=jnp.int32)[None, :]
    positions = jnp.where(index < lengths[:, None], state.committed[:, None] + index, PADDING_POSITION)
    return RaggedBatch.rectangle(tokens, positions), is_prompt


def _verify(
    target: Target,
    draft: Draft | None,
    state: RoundState,
    batch: RaggedBatch,
    chunk: PromptChunk | None,
    config: StepConfig,
) -> tuple[Int32[Array, "B verified"], Float[Array, "T mH"], KVPages]:
    """The target's own token after each verify row (after the last prompt token for prompt rows), its taps,
    its pages.
    """
    cache = KVCache(
        pages=state.target_pages, page_table=state.page_table[:, : config.num_pages], lengths=state.committed
    )
    hidden, taps, cache = tapped_forward(target, batch, cache, () if draft is None else draft.config.taps)
    by_row = batch.to_rows(hidden)
    num_verified = 1 + state.drafts.shape[1]
    if chunk is None:
        wanted = by_row[:, :num_verified]
    else:
        last = jnp.maximum(chunk.lengths - 1, 0)[:, None]
        index = jnp.where(chunk.is_prompt[:, None], last, jnp.arange(num_verified, dtype=jnp.int32)[None, :])
        wanted = jnp.take_along_axis(by_row, index[:, :, None], axis=1)
    return argmax(target.compute_logits(wanted), state.target_pages.platform.argmax), taps, cache.pages


def _commit(
    state: RoundState, chunk: PromptChunk | None, choices: Int32[Array, "B verified"], is_prompt: Bool[Array, "B"]
) -> tuple[RoundState, RoundOutput, Int32[Array, "B"]]:
    """Accept, emit, advance P. Also the number of batch tokens per row that become draft context."""
    offered = jnp.where(is_prompt | state.finished, 0, state.num_drafts)
    verdict = accept_greedy(state.drafts, offered, choices)
    is_round = ~is_prompt & ~state.finished
    emits = is_round if chunk is None else is_round | (is_prompt & chunk.is_last)
    emission = cut_emission(state.drafts, verdict, state.stop_ids, jnp.where(emits, state.remaining, 0), NO_TOKEN)
    kept = emission.num_tokens
    if chunk is not None:
        kept = jnp.where(is_prompt, chunk.lengths, kept)
    remaining = state.remaining - emission.num_tokens
    output = RoundOutput(
        tokens=emission.tokens,
        num_tokens=emission.num_tokens,
        is_round=is_round,
        proposed=_cut_at_stop(offered, verdict, emission.num_tokens, emission.stopped),
        accepted=_cut_at_stop(verdict.accepted, verdict, emission.num_tokens, emission.stopped),
        non_finite=jnp.zeros_like(is_round),
    )
    state = dataclasses.replace(
        state,
        committed=state.committed + kept,
        anchor=jnp.where(emits & (emission.num_tokens > 0), emission.last_token, state.anchor),
        remaining=remaining,
        finished=state.finished | (emits & (emission.stopped | (remaining <= 0))),
    )
    return state, output, kept


def _cut_at_stop(
    length: Int32[Array, "B"], verdict: Verdict, num_tokens: Int32[Array, "B"], stopped: Bool[Array, "B"]
) -> Int32[Array, "B"]:
    """A stop token among the accepted drafts ends proposal and acceptance there; as next token it cuts neither."""
    return jnp.where(stopped & (num_tokens <= verdict.accepted), num_tokens, length)


def _propose(
    target: Target, draft: Draft, state: RoundState, batch: RaggedBatch, taps: Float[Array, "T mH"], config: StepConfig
) -> tuple[RoundState, Bool[Array, "B"]]:
    """Store the context of the committed tokens, then draft the next block at the new anchor."""
    assert state.draft_pages is not None
    table = state.page_table[:, : config.num_pages]
    cache = KVCache(pages=state.draft_pages, page_table=table, lengths=state.committed)
    context = draft.project_target_hidden(taps)
    cache = draft.materialize_kv(context, batch, cache)
    num_slots = config.num_speculative_tokens + (0 if draft.config.sample_from_anchor else 1)
    hidden = draft.forward_block(draft.embed_block(state.anchor, target), cache, num_slots)
    base_logits = draft.compute_logits(hidden, target)
    drafts = draft.sample_draft_tokens(base_logits, state.anchor, hidden=hidden)
    finite = jnp.all(jnp.isfinite(hidden), axis=(1, 2)) & _kept_rows_finite(context, batch)
    free_positions = state.page_table.shape[1] * cache.pages.page_size - 1 - state.committed
    length = jnp.clip(free_positions, 0, config.num_speculative_tokens)
    confidence = draft.predict_confidence(hidden, state.anchor, drafts)
    if confidence is not None:
        length = jnp.minimum(length, draft.proposal_length(confidence, state.confidence_threshold))
    length = jnp.where(finite, length, 0)
    state = dataclasses.replace(state, draft_pages=cache.pages, drafts=drafts, num_drafts=length)
    return state, ~finite & ~state.finished


def _kept_rows_finite(context: Float[Array, "T d"], batch: RaggedBatch) -> Bool[Array, "B"]:
    finite = jnp.all(jnp.isfinite(context), axis=-1) | (batch.positions == PADDING_POSITION)
    return jnp.all(batch.to_rows(finite), axis=1)
