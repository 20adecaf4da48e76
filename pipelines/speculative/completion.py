"""What became of a request, as it grows token by token."""

from __future__ import annotations

import dataclasses
from typing import Literal

from dspark_jax.pipelines.speculative.generation import Request

FinishReason = Literal["stop", "length", "cancelled"]


@dataclasses.dataclass(kw_only=True)
class Completion:
    """The output of a request. `rounds` holds (proposed, accepted) of every verification.

    The first token belongs to no round, and neither does one that a row emits when it resumes after it gave its pages
    away.
    """

    request: Request
    allowed_new_tokens: int  # what the request asks for, or what is left of the longest sequence
    output_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    rounds: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    non_finite_rounds: int = 0
    num_resumes: int = 0  # how often the prompt, and what was said so far, went through the target again
    prefill_seconds: float = 0.0  # from admission to the first token
    decode_seconds: float = 0.0  # wall time between the first and the last token, shared with the rows beside it

    @property
    def committed(self) -> int:
        """Tokens that the rounds committed: accepted drafts and the target's own, what the budget cut off included.

        A round that ends in an accepted stop token has no token of the target's own.
        """
        total = sum(accepted + 1 for _, accepted in self.rounds)
        said_in_rounds = len(self.output_ids) - 1 - self.num_resumes
        return total - (self.finish_reason == "stop" and said_in_rounds < total)

    @property
    def tau(self) -> float | None:
        """Mean acceptance length, `committed` per round; `None` without a round."""
        return self.committed / len(self.rounds) if self.rounds else None
