"""The proposal of a draft: the drafts of every row, which the next round verifies."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Float, Int32

Sampler = Callable[[Float[Array, "B Vd"], int], Int32[Array, "B"]]
"""`sampler(logits, slot)` picks a draft id for every row."""


class Proposal(NamedTuple):
    """The drafts of every row, and what deciding about them needs.

    Every leaf leads with the rows, so that a proposal is part of a row's state from one round to the next.
    """

    tokens: Int32[Array, "B D"]  # target ids
    length: Int32[Array, "B"]  # the first `length` tokens are offered; the rest is not part of the proposal
    probabilities: Float[Array, "B D Vd"] | None = None  # q, where drafts are sampled; None: they are argmaxima
