"""A grammar of token ids without any text, for tests of engines: what may come next depends on the last two tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from dspark_jax.pipelines.sampling.generation import Request
from dspark_jax.pipelines.sampling.grammar import Grammar
from tests.support.random_pairs import VOCAB

TOY = Grammar.regex("toy")  # what a request states; its `new_matcher` is a `ToyMatcher`
LONGEST, SHORTEST = 14, 5


class ToyMatcher:
    """A `TokenMatcher` that keeps the whole text."""

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self.ids = list(ids)

    def allowed(self) -> np.ndarray:
        """As in `TokenMatcher`."""
        bits = np.zeros((64,), np.uint8)
        bits[sorted(following(self.ids))] = 1
        return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)

    def is_complete(self) -> bool:
        """As in `TokenMatcher`."""
        return is_complete(self.ids)

    def push(self, token: int) -> bool:
        """As in `TokenMatcher`."""
        if token not in following(self.ids):
            return False
        self.ids.append(token)
        return True

    def is_broken(self) -> bool:
        """As in `TokenMatcher`."""
        return False

    def copy(self) -> ToyMatcher:
        """As in `TokenMatcher`."""
        return ToyMatcher(self.ids)


def following(ids: Sequence[int]) -> frozenset[int]:
    """The ids that may come after these: three in four, chosen by the last two tokens. None after the longest text."""
    return frozenset() if len(ids) >= LONGEST else _chosen(tuple(ids[-2:]))


@functools.cache
def _chosen(last: tuple[int, ...]) -> frozenset[int]:
    drawn = np.random.default_rng((len(last), *last)).random(VOCAB)
    return frozenset(np.flatnonzero(drawn < 0.75).tolist())


def is_complete(ids: Sequence[int]) -> bool:
    """Whether the text may end here."""
    return len(ids) >= SHORTEST and (len(ids) == LONGEST or ids[-1] % 2 == 0)


def ends(ids: Sequence[int], stop_ids: Sequence[int]) -> frozenset[int]:
    """The stop tokens that may come after these ids."""
    return frozenset(stop_ids) if is_complete(ids) else frozenset()


def allowed_next(request: Request, ids: Sequence[int]) -> np.ndarray | None:
    """Whether each id may follow `ids`, the output so far, for tests; `None` without a grammar."""
    if request.generation.grammar is None:
        return None
    allowed = np.zeros((VOCAB,), bool)
    allowed[sorted(following(ids) - set(request.stop_ids) | ends(ids, request.stop_ids))] = True
    allowed[list(request.generation.banned_ids)] = False
    if len(ids) < request.generation.min_new_tokens:
        allowed[list(request.stop_ids)] = False
    return allowed
