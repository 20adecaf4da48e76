"""Which drafts the target accepts, and where a row's output is cut. No other file makes these decisions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Shaped

from dspark_jax.architectures.proposal import Proposal

Argmax = Callable[[Float[Array, "T V"]], Int32[Array, "T"]]


@dataclasses.dataclass(frozen=True)
class VerifyLogits:
    """The target's logits of the step's flat batch, and where those of each row's anchor and drafts are in it.

    Rows verify proposals of different lengths, packed one after the other. Reduce the flat logits first, for example
    to an argmax, and select per row after that: the `[T, V]` logits are never copied into a padded `[B, k + 1, V]`.
    """

    flat: Float[Array, "T V"]  # float32
    index: Int32[Array, "B verified"]  # index in `flat` of the logits after the anchor (column 0) and after each draft

    def by_row(self, reduced: Shaped[Array, "T *axes"]) -> Shaped[Array, "B verified *axes"]:
        """Results per flat token -> per row and verified position. Entries past a row's proposal are undefined."""
        rows, width = self.index.shape
        if reduced.shape[0] == rows * width:  # every row has the same width and nothing else is in the batch
            return reduced.reshape(rows, width, *reduced.shape[1:])
        return reduced[self.index]


class Verdict(NamedTuple):
    """Per row: how many drafts are accepted (the longest prefix), and the token that the target adds after them."""

    accepted: Int32[Array, "B"]
    next_token: Int32[Array, "B"]


def decide(proposal: Proposal, logits: VerifyLogits, argmax: Argmax) -> Verdict:
    """Greedy decision: a draft is accepted iff it is the argmax of the target's logits for its position.

    `argmax` must be exact and return the first index on ties.
    """
    return accept_greedy(proposal, logits.by_row(argmax(logits.flat)))


def accept_greedy(proposal: Proposal, target_tokens: Int32[Array, "B verified"]) -> Verdict:
    """Draft i is accepted iff it equals `target_tokens[:, i]` and all earlier drafts are accepted.

    `target_tokens[:, i]` is the target's own token for position `P + i + 1`; it has one column more than there are
    drafts. The next token is the target's token at column `accepted`: a correction if a draft was rejected, else the
    bonus. The text equals that of plain greedy decoding.
    """
    slots = jnp.arange(proposal.tokens.shape[1], dtype=jnp.int32)[None, :]
    agrees = (proposal.tokens == target_tokens[:, :-1]) & (slots < proposal.length[:, None])
    accepted = jnp.sum(jnp.cumprod(agrees.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    return Verdict(accepted, jnp.take_along_axis(target_tokens, accepted[:, None], axis=1)[:, 0])


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
