"""What the target accepts of a proposal, and where a row's output is cut. The only place that decides."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Shaped

from dspark_jax.architectures.drafting.proposal import Proposal

Argmax = Callable[[Float[Array, "T V"]], Int32[Array, "T"]]


@dataclasses.dataclass(frozen=True)
class VerifyLogits:
    """The target's logits at every verify row, as they lie in the step's flat batch.

    Rows verify proposals of different lengths, packed one after the other. A rule reduces the flat logits first and
    picks the results of each row after that: `[T, V]` logits are never copied into a padded `[B, k + 1, V]`.
    """

    flat: Float[Array, "T V"]  # float32
    place: Int32[Array, "B verified"]  # where in `flat` are the logits that follow the anchor, and each draft

    def by_row(self, reduced: Shaped[Array, "T *axes"]) -> Shaped[Array, "B verified *axes"]:
        """What was computed of each flat row, per verify row. Places past a row's proposal mean nothing."""
        rows, width = self.place.shape
        if reduced.shape[0] == rows * width:  # every row has the same width and nothing else is in the batch
            return reduced.reshape(rows, width, *reduced.shape[1:])
        return reduced[self.place]


class Verdict(NamedTuple):
    """Longest accepted prefix per row, and the token that the target adds after it."""

    accepted: Int32[Array, "B"]
    next_token: Int32[Array, "B"]


def decide(proposal: Proposal, logits: VerifyLogits, argmax: Argmax) -> Verdict:
    """Greedy decision: a draft is accepted iff it is the argmax of the target's logits at its verify row.

    `argmax` is exact, the first index on ties.
    """
    return accept_greedy(proposal, logits.by_row(argmax(logits.flat)))


def accept_greedy(proposal: Proposal, choices: Int32[Array, "B verified"]) -> Verdict:
    """Equality with the target's own tokens: draft i is accepted iff it equals the target's choice at verify row i and
    all earlier drafts were accepted.

    `choices[:, i]` is the target's token for position `P + i + 1`; there is one more of them than drafts. The next
    token is the choice at row `accepted`: the correction after a rejection, the bonus after none. The text is exactly
    that of plain greedy decoding.
    """
    slots = jnp.arange(proposal.tokens.shape[1], dtype=jnp.int32)[None, :]
    agrees = (proposal.tokens == choices[:, :-1]) & (slots < proposal.length[:, None])
    accepted = jnp.sum(jnp.cumprod(agrees.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    return Verdict(accepted, jnp.take_along_axis(choices, accepted[:, None], axis=1)[:, 0])


class Emission(NamedTuple):
    """What a row says after the cuts."""

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
    """The accepted drafts and the next token, cut inside the block after the first stop token and at the row's
    budget.
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
