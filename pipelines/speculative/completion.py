"""The output of one request; it grows while the request runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

from dspark_jax.pipelines.sampling.generation import Request

# `grammar`: the text became too complex for the matcher of its grammar, and does not match it.
FinishReason = Literal["stop", "length", "grammar", "cancelled"]


class TokenLogprobs(NamedTuple):
    """Natural log-probabilities at one output position, by the model alone, without any sampling control."""

    chosen: float  # of the output token
    top: tuple[tuple[int, float], ...]  # (token id, log-probability) of the most probable tokens, in falling order


def reaching(counts: Sequence[int], width: int) -> tuple[int, ...]:
    """For each position below `width`, how many of `counts`, drafts of one round each, go beyond it."""
    return tuple(sum(count > position for count in counts) for position in range(width))


@dataclasses.dataclass(kw_only=True)
class Completion:
    """The output of one request, its rounds and its times in seconds.

    The first token belongs to no round: it comes from the prompt. The same holds for the first token after a request
    was preempted and resumed.
    """

    request: Request
    allowed_new_tokens: int  # the request's budget, or the rest of the longest sequence if that is less
    output_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)  # per output id, where asked for
    finish_reason: FinishReason | None = None
    rounds: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (proposed, accepted) drafts
    non_finite_rounds: int = 0  # rounds after which the draft gave states that are not finite, and proposed nothing
    num_resumes: int = 0  # how often the request was preempted and its text went through the target again
    prefill_seconds: float = 0.0  # from admission to the first token
    decode_seconds: float = 0.0  # from the first token to the last, wall time: rows that run together share it

    @property
    def committed(self) -> int:
        """Tokens that all rounds committed: accepted drafts and bonus tokens, including those that the budget cut off.

        A round that ends with an accepted stop token has no bonus token.
        """
        total = sum(accepted + 1 for _, accepted in self.rounds)
        emitted_in_rounds = len(self.output_ids) - 1 - self.num_resumes
        return total - (self.finish_reason in ("stop", "grammar") and 0 <= emitted_in_rounds < total)

    @property
    def tau(self) -> float | None:
        """Mean acceptance length, `committed` per round; `None` without a round."""
        return self.committed / len(self.rounds) if self.rounds else None
