"""What the target accepts of a proposal, and where a row's output is cut. The only place that decides."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


class Verdict(NamedTuple):
    """Longest accepted prefix per row, and the token that the target adds after it."""

    accepted: Int32[Array, "B"]
    next_token: Int32[Array, "B"]


def accept_greedy(
    drafts: Int32[Array, "B k"], num_drafts: Int32[Array, "B"], choices: Int32[Array, "B k+1"]
) -> Verdict:
    """Greedy equality: draft i is accepted iff it equals the target's argmax at verify row i and all earlier drafts
    were accepted.

    `choices[:, i]` is the target's own token for position `P + i + 1`. Drafts from `num_drafts` on are not part of the
    proposal. The next token is the target's at row `accepted`: the correction after a rejection, the bonus after none.
    The text is exactly that of plain greedy decoding.
    """
    slots = jnp.arange(drafts.shape[1], dtype=jnp.int32)[None, :]
    agrees = (drafts == choices[:, :-1]) & (slots < num_drafts[:, None])
    accepted = jnp.sum(jnp.cumprod(agrees.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    return Verdict(accepted, jnp.take_along_axis(choices, accepted[:, None], axis=1)[:, 0])


class Emission(NamedTuple):
    """What a row says after the cuts."""

    tokens: Int32[Array, "B k+1"]
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
    """The accepted drafts and the next token, cut inside the block after the first stop token and at the
    row's budget.
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
