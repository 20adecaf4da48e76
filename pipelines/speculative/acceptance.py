"""Which drafts the target accepts, and where a row's output is cut. No other file makes these decisions.

`docs/sampling.md` shows why the rules keep the target's distribution.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Shaped, UInt32

from dspark_jax.architectures.proposal import Proposal
from dspark_jax.pipelines.sampling.draws import Purpose, Uniforms, row_sums, weighted_choice
from dspark_jax.pipelines.sampling.edits import Text, edited_logits
from dspark_jax.pipelines.sampling.filters import token_weights
from dspark_jax.pipelines.sampling.policy import Policy
from dspark_jax.pipelines.sampling.rules import Relaxed, Rule, Synthetic
from dspark_jax.pipelines.sampling.token_masks import masked_logits
from dspark_jax.pipelines.speculative.state import Rows

Argmax = Callable[[Float[Array, "T V"]], Int32[Array, "T"]]
_NO_MASS = 1e-8  # of a residual: what rounding leaves where target and draft agree


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyLogits:
    """The target's logits of the step's flat batch, and where those of each row's anchor and drafts are in it.

    Rows verify proposals of different lengths, packed one after the other. Reduce the flat logits first, for example
    to an argmax, and select per row after that: the `[T, V]` logits are never copied into a padded `[B, k + 1, V]`.
    """

    flat: Float[Array, "T V"]  # float32
    index: Int32[Array, "B verified"]  # index in `flat` of the logits after the anchor (column 0) and after each draft
    rows: Int32[Array, "T"]  # the row that each of the flat logits belongs to
    positions: Int32[Array, "T"]  # of the token that the logits choose

    def by_row(self, reduced: Shaped[Array, "T *axes"]) -> Shaped[Array, "B verified *axes"]:
        """Results per flat token -> per row and verified position. Entries past a row's proposal are undefined."""
        rows, width = self.index.shape
        if reduced.shape[0] == rows * width:  # every row has the same width and nothing else is in the batch
            return reduced.reshape(rows, width, *reduced.shape[1:])
        return reduced[self.index]

    def of_columns(self, values: Shaped[Array, "B verified *axes"]) -> Shaped[Array, "T *axes"]:
        """Values per row and verified position -> per flat token, the inverse of `by_row`."""
        rows, width = self.index.shape
        if self.flat.shape[0] == rows * width:
            return values.reshape(rows * width, *values.shape[2:])
        column = self.positions - self.by_row(self.positions)[:, 0][self.rows]
        return values[self.rows, jnp.clip(column, 0, width - 1)]


class TargetChoices(NamedTuple):
    """What the target itself chooses, per flat logits."""

    tokens: Int32[Array, "T"]
    sampled: Bool[Array, "T"]  # drawn from `weights`; false: the most probable token
    weights: Float[Array, "T V"]  # probabilities after all controls, times `total`
    total: Float[Array, "T"]


class Verdict(NamedTuple):
    """Per row: how many drafts are accepted (the longest prefix), and the token that the target adds after them."""

    accepted: Int32[Array, "B"]
    next_token: Int32[Array, "B"]


def decide(
    proposal: Proposal,
    logits: VerifyLogits,
    rows: Rows,
    policy: Policy,
    argmax: Argmax,
    draft_ids: Int32[Array, "Vd"] | None = None,
    rule: Rule | None = None,
    allowed: UInt32[Array, "B verified words"] | None = None,
) -> Verdict:
    """Which drafts of each row are accepted, and the token after them; by what `rows` ask for, as far as `policy` has
    it.

    `argmax` must be exact and return the first index on ties. `rows.history` holds the text and the drafts.
    `draft_ids` are the target ids of the draft's vocabulary, `None` if it is the target's. `rule` replaces the exact
    rule. `allowed` are the masks of `TokenMasks`, needed if `policy` has masks.
    """
    processed = _edited(logits, rows) if policy.edits else logits.flat
    if policy.masks:
        assert allowed is not None
        processed = masked_logits(processed, logits.of_columns(allowed))
    greedy = argmax(processed)
    if isinstance(rule, Synthetic):
        return _accept_synthetic(proposal, logits, greedy, rows, rule)
    if not policy.samples:
        return accept_equal(proposal, logits.by_row(greedy))
    controls = rows.controls.of_rows(logits.rows)
    weights = token_weights(processed, controls)
    total = row_sums(weights)
    uniforms = Uniforms(controls.seed, logits.positions)
    drawn = weighted_choice(weights, uniforms.pair(Purpose.TARGET_CHOICE))
    sampled = (controls.temperature > 0) & (total > 0) & jnp.isfinite(total)
    target = TargetChoices(jnp.where(sampled, drawn, greedy), sampled, weights, total)
    if rule is not None:
        return _accept_relaxed(proposal, dataclasses.replace(logits, flat=processed), target, greedy, rule)
    if proposal.probabilities is None:
        return accept_equal(proposal, logits.by_row(target.tokens))
    return accept_sampled(proposal, logits, target, uniforms, draft_ids)


def _edited(logits: VerifyLogits, rows: Rows) -> Float[Array, "T V"]:
    text = Text(
        history=rows.history,
        first=logits.by_row(logits.positions)[:, 0],
        width=logits.index.shape[1],
        rows=logits.rows,
        positions=logits.positions,
    )
    return edited_logits(logits.flat, rows.controls, text, rows.stop_ids)


def accept_equal(proposal: Proposal, target_tokens: Int32[Array, "B verified"]) -> Verdict:
    """Draft i is accepted iff it equals `target_tokens[:, i]` and all earlier drafts are accepted.

    `target_tokens[:, i]` is the token that the target itself chooses for position `P + i + 1`, greedily or by its own
    random numbers; there is one column more than there are drafts. The next token is the target's token at column
    `accepted`: a correction if a draft was rejected, else the bonus. The text equals that of plain decoding with the
    same numbers.
    """
    accepted = _accepted(proposal, proposal.tokens == target_tokens[:, :-1])
    return Verdict(accepted, jnp.take_along_axis(target_tokens, accepted[:, None], axis=1)[:, 0])


def accept_sampled(
    proposal: Proposal,
    logits: VerifyLogits,
    target: TargetChoices,
    uniforms: Uniforms,
    draft_ids: Int32[Array, "Vd"] | None,
) -> Verdict:
    """Rejection sampling: draft y is accepted with probability `min(1, p(y) / q(y))`; the token that replaces the first
    rejected draft is drawn from `max(p - q, 0)`, and the bonus from p. Distributions as in plain decoding.

    `proposal` holds q, over draft ids; `draft_ids` are the target ids of these, `None` if they are the same. Rows that
    do not sample accept by equality.
    """
    assert proposal.probabilities is not None
    assert proposal.token_probabilities is not None
    flat_index, rows = logits.index[:, :-1], jnp.arange(logits.index.shape[0], dtype=jnp.int32)
    number = logits.by_row(uniforms.one(Purpose.ACCEPTANCE))[:, :-1]
    weight, total = target.weights[flat_index, proposal.tokens], logits.by_row(target.total)
    is_likely = number * proposal.token_probabilities * total[:, :-1] < weight
    tokens, sampled = logits.by_row(target.tokens), logits.by_row(target.sampled)
    accepted = _accepted(proposal, jnp.where(sampled[:, :-1], is_likely, proposal.tokens == tokens[:, :-1]))

    end = logits.index[rows, accepted]
    probabilities = target.weights[end] / jnp.maximum(target.total[end], jnp.finfo(jnp.float32).tiny)[:, None]
    rejected = jnp.minimum(accepted, proposal.tokens.shape[1] - 1)
    drafted = jnp.zeros_like(probabilities)
    ids = jnp.arange(proposal.probabilities.shape[2], dtype=jnp.int32) if draft_ids is None else draft_ids
    drafted = drafted.at[:, ids].set(proposal.probabilities[rows, rejected])
    residual = weighted_choice(residual_weights(probabilities, drafted), uniforms.pair(Purpose.RESIDUAL_CHOICE)[end])
    is_residual = (accepted < proposal.length) & target.sampled[end]
    return Verdict(accepted, jnp.where(is_residual, residual, target.tokens[end]))


def residual_weights(p: Float[Array, "B V"], q: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """`max(p - q, 0)`, not normalised: what is left of p after the drafts from q. Without any mass left, p itself."""
    left = jnp.maximum(p - q, 0)
    return jnp.where((row_sums(left) > _NO_MASS)[:, None], left, p)


def _accept_relaxed(
    proposal: Proposal, logits: VerifyLogits, target: TargetChoices, greedy: Int32[Array, "T"], rule: Relaxed
) -> Verdict:
    """Drafts by `Relaxed`; the first rejected one is replaced by the most probable token, the bonus is as ever.

    `logits` are edited and masked. Of equally probable tokens the first counts as the more probable.
    """
    of_drafts = logits.flat[logits.index[:, :-1], proposal.tokens]
    largest = jnp.max(logits.flat, axis=1, keepdims=True)
    total = logits.by_row(row_sums(jnp.exp(logits.flat - largest)))[:, :-1]
    gap = 1 - jnp.exp(of_drafts - logits.by_row(largest[:, 0])[:, :-1])  # to the first, in shares of its probability
    ids = jnp.arange(logits.flat.shape[1], dtype=jnp.int32)[None]
    ranks = []
    for column in range(proposal.tokens.shape[1]):
        others, own = logits.flat[logits.index[:, column]], of_drafts[:, column, None]
        is_before = (others > own) | ((others == own) & (ids < proposal.tokens[:, column, None]))
        ranks.append(jnp.sum(is_before, axis=1, dtype=jnp.int32))
    is_allowed = of_drafts > -jnp.inf
    is_near = is_allowed & (jnp.stack(ranks, axis=1) < rule.top_n) & (gap / total <= rule.delta)
    tokens, sampled = logits.by_row(target.tokens), logits.by_row(target.sampled)
    accepted = _accepted(proposal, jnp.where(sampled[:, :-1], is_near, proposal.tokens == tokens[:, :-1]))
    end = jnp.take_along_axis(logits.index, accepted[:, None], axis=1)[:, 0]
    return Verdict(accepted, jnp.where(accepted < proposal.length, greedy[end], target.tokens[end]))


def _accept_synthetic(
    proposal: Proposal, logits: VerifyLogits, greedy: Int32[Array, "T"], rows: Rows, rule: Synthetic
) -> Verdict:
    """Drafts by `Synthetic`; the token after them is the target's most probable one."""
    by_length = [rule.probability(length) for length in range(proposal.tokens.shape[1] + 1)]
    probability = jnp.asarray(by_length, jnp.float32)[proposal.length]
    uniforms = Uniforms(rows.controls.of_rows(logits.rows).seed, logits.positions)
    number = logits.by_row(uniforms.one(Purpose.ACCEPTANCE))[:, :-1]
    accepted = _accepted(proposal, number < probability[:, None])
    return Verdict(accepted, jnp.take_along_axis(logits.by_row(greedy), accepted[:, None], axis=1)[:, 0])


def _accepted(proposal: Proposal, agrees: Bool[Array, "B k"]) -> Int32[Array, "B"]:
    """The number of drafts before the first one that is not agreed to or not part of the proposal."""
    slots = jnp.arange(proposal.tokens.shape[1], dtype=jnp.int32)[None, :]
    agrees = agrees & (slots < proposal.length[:, None])
    return jnp.sum(jnp.cumprod(agrees.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


class Emission(NamedTuple):
    """The tokens that a row emits in one round."""

    tokens: Int32[Array, "B verified"]
    num_tokens: Int32[Array, "B"]
    stopped: Bool[Array, "B"]  # the last emitted token is a stop token
    last_token: Int32[Array, "B"]


def cut_emission(
    drafts: Int32[Array, "B k"],
    verdict: Verdict,
    stop_ids: Int32[Array, "B n"],
    remaining: Int32[Array, "B"],
    no_token: int,
) -> Emission:
    """The accepted drafts and the next token, cut after the first stop token and at `remaining` tokens.

    `stop_ids` are padded with `no_token`; so are the emitted tokens.
    """
    slots = jnp.arange(drafts.shape[1] + 1, dtype=jnp.int32)[None, :]
    padded = jnp.concatenate([drafts, verdict.next_token[:, None]], axis=1)
    tokens = jnp.where(slots == verdict.accepted[:, None], verdict.next_token[:, None], padded)
    allowed = jnp.minimum(verdict.accepted + 1, remaining)
    is_stop = jnp.any(tokens[:, :, None] == stop_ids[:, None, :], axis=-1) & (slots < allowed[:, None])
    stopped = jnp.any(is_stop, axis=1)
    num_tokens = jnp.where(stopped, jnp.argmax(is_stop, axis=1).astype(jnp.int32) + 1, allowed)
    last = jnp.take_along_axis(tokens, jnp.maximum(num_tokens - 1, 0)[:, None], axis=1)[:, 0]
    return Emission(jnp.where(slots < num_tokens[:, None], tokens, no_token), num_tokens, stopped, last)
