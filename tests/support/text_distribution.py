"""The exact distribution of the first three tokens of a `BigramTarget`, and a test of draws against it."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import numpy as np

from dspark_jax.pipelines.sampling.generation import Generation
from tests.support.bigram_pair import FOLLOWS, LENGTH, TABLE, VOCAB
from tests.support.sampled_twin import edited, filtered

_FEWEST = 5  # expected draws of a cell: rarer texts are counted together
_LARGEST_Z = 4.0  # chance of a false alarm: 1 in 30,000


@functools.cache
def text_probabilities(generation: Generation) -> np.ndarray:
    """Probability of every text, `[V, V, V]`, by the rules of `docs/sampling.md`, in float64."""
    joint = np.zeros((VOCAB,) * LENGTH)
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        probability = 1.0
        for place, token in enumerate(text):
            before = (0, *text[:place])
            logits = edited(TABLE[before[-1]].astype(np.float64), generation, before[:1], before[1:])
            if generation.grammar is not None:
                logits[~FOLLOWS[before[-1]]] = -np.inf
            if generation.temperature:
                probability *= filtered(logits, generation)[token]
            else:
                probability *= float(logits.argmax() == token)
            if not probability:
                break
        joint[text] = probability
    return joint


class Deviation(NamedTuple):
    """How far draws are from a distribution, in standard deviations."""

    chi_square: float  # of the joint distribution of three tokens
    token: float  # the largest over all positions and tokens

    @property
    def is_chance(self) -> bool:
        """Whether both are what chance explains."""
        return self.chi_square < _LARGEST_Z and self.token < _LARGEST_Z


def deviation(texts: np.ndarray, generation: Generation) -> Deviation:
    """The deviation of texts `[N, 3]` from the exact distribution; infinite for a text that is impossible."""
    expected = text_probabilities(generation) * len(texts)
    counts = np.zeros_like(expected)
    np.add.at(counts, tuple(texts.T), 1)
    if counts[expected == 0].any():
        return Deviation(np.inf, np.inf)
    is_common = expected >= _FEWEST
    seen = np.append(counts[is_common], counts[~is_common].sum())
    wanted = np.append(expected[is_common], expected[~is_common].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    chi_square = float(((seen - wanted) ** 2 / wanted).sum())
    return Deviation(_normal_quantile(chi_square, len(wanted) - 1), _token_deviation(counts, expected, len(texts)))


def _token_deviation(counts: np.ndarray, expected: np.ndarray, total: int) -> float:
    largest = 0.0
    for place in range(LENGTH):
        others = tuple(axis for axis in range(LENGTH) if axis != place)
        seen, wanted = counts.sum(axis=others), expected.sum(axis=others)
        spread = np.sqrt(np.maximum(wanted * (1 - wanted / total), 1e-9))
        largest = max(largest, float(np.max(np.where(wanted > 0, np.abs(seen - wanted) / np.maximum(spread, 1), 0))))
    return largest


def _normal_quantile(chi_square: float, degrees: int) -> float:
    """The chi-square value as a standard normal one (Wilson and Hilferty)."""
    if not degrees:
        return 0.0
    part = 2 / (9 * degrees)
    return float((np.cbrt(chi_square / degrees) - (1 - part)) / np.sqrt(part))
