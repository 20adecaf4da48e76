"""The proposal of a draft: the draft tokens of every row, which the next round verifies."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int32

Sampler = Callable[[Float[Array, "B Vd"], int], Int32[Array, "B"]]
"""`sampler(logits, slot)` chooses the draft id of every row for one slot."""


class Proposal(NamedTuple):
    """The drafts of every row, with what the acceptance rule needs to decide about them.

    Every leaf has the row axis first, because a proposal is kept in the rows' state until the next round.
    """

    tokens: Int32[Array, "B D"]  # target ids
    length: Int32[Array, "B"]  # number of tokens to verify; the tokens after them are not part of the proposal
    # Probability q of every draft id in every slot. None: the drafts are not sampled but the argmax of their logits.
    probabilities: Float[Array, "B D Vd"] | None = None
    token_probabilities: Float[Array, "B D"] | None = None  # q of the drafts themselves
    # Whether the numbers that chose the drafts were finite. A draft states it, a round acts on it and does not keep it.
    finite: Bool[Array, "B"] | None = None
