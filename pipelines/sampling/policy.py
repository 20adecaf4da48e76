"""The static part of sampling: which kinds of control a compiled round has. A round pays only for these."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

from dspark_jax.pipelines.sampling.generation import Generation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """The kinds of control of the rows that run together. A program is compiled for each policy in use.

    Rows that do not use a control of the policy are computed with its neutral value, which changes nothing.
    """

    samples: bool = False  # some rows have a temperature above 0
    edits: bool = False  # some rows have a bias, banned ids, penalties or a least number of tokens
    logprobs: bool = False  # some rows want log-probabilities
    masks: bool = False  # some rows have a grammar: the host masks tokens, one round per call

    @classmethod
    def of(cls, generation: Generation) -> Policy:
        """What one request needs."""
        return cls(
            samples=generation.samples,
            edits=generation.edits_logits,
            logprobs=generation.num_logprobs is not None,
            masks=generation.grammar is not None,
        )

    @classmethod
    def joint(cls, generations: Iterable[Generation]) -> Policy:
        """What several requests need that run together."""
        return functools.reduce(cls.__or__, map(cls.of, generations), cls())

    @classmethod
    def mixtures(cls, generations: Iterable[Generation]) -> tuple[Policy, ...]:
        """What each choice of these requests needs that can run together."""
        found = {cls.of(generation): None for generation in generations}
        for policy in tuple(found):
            found |= {policy | other: None for other in found}
        return tuple(found)

    def __or__(self, other: Policy) -> Policy:
        return Policy(
            samples=self.samples or other.samples,
            edits=self.edits or other.edits,
            logprobs=self.logprobs or other.logprobs,
            masks=self.masks or other.masks,
        )


GREEDY = Policy()
