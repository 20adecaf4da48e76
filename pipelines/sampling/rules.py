"""Acceptance rules that change what the target says. They are off by default, and whoever uses one says so.

`Relaxed` trades exactness for speed. `Synthetic` accepts at a rate that is given, so that the speed of a system can be
measured for a draft that does not exist yet; its text means nothing.
"""

from __future__ import annotations

import dataclasses

from dspark_jax.speculators_common.errors import RequestError
from dspark_jax.speculators_common.scalars import is_integer, is_number

_TOLERANCE = 1e-9  # of the bisection for a synthetic rate


@dataclasses.dataclass(frozen=True)
class Relaxed:
    """Accepts a draft that is among the `top_n` most probable tokens of the target and at most `delta` less probable
    than the first. Probabilities are those of the logits after penalties, biases, banned ids and grammar, before
    temperature and filters. Greedy rows stay exact.
    """

    top_n: int = 10
    delta: float = 0.6

    def __post_init__(self) -> None:
        if not is_integer(self.top_n) or self.top_n < 1:
            raise RequestError(field="acceptance: top_n", found=self.top_n, allowed="1 or more")
        if not is_number(self.delta) or not 0 <= self.delta <= 1:
            raise RequestError(field="acceptance: delta", found=self.delta, allowed="0..1")

    def __str__(self) -> str:
        return f"relaxed acceptance, not exact (top {self.top_n}, delta {self.delta})"


@dataclasses.dataclass(frozen=True)
class Synthetic:
    """Accepts drafts by chance, so that this share of all proposed drafts is accepted on average."""

    rate: float

    def __post_init__(self) -> None:
        if not is_number(self.rate) or not 0 <= self.rate <= 1:
            raise RequestError(field="acceptance: rate", found=self.rate, allowed="0..1")

    def __str__(self) -> str:
        return f"synthetic acceptance, for measurements only (rate {self.rate})"

    def probability(self, num_drafts: int) -> float:
        """The probability s with which each draft after accepted ones is accepted: the mean of s, s^2, ... s^k is the
        rate.
        """
        if self.rate <= 0 or self.rate >= 1 or not num_drafts:
            return float(min(max(self.rate, 0), 1))
        low, high = 0.0, 1.0
        while high - low > _TOLERANCE:
            middle = (low + high) / 2
            mean = sum(middle**power for power in range(1, num_drafts + 1)) / num_drafts
            low, high = (middle, high) if mean < self.rate else (low, middle)
        return (low + high) / 2


Rule = Relaxed | Synthetic


def parse_rule(text: str) -> Rule | None:
    """The rule that `text` names: `exact` (`None`), `relaxed`, `relaxed:N,DELTA`, `synthetic:RATE`.

    Raises `RequestError` for anything else.
    """
    name, colon, values = text.partition(":")
    try:
        numbers = [float(value) for value in values.split(",")] if colon else []
        if name == "exact" and not numbers:
            return None
        if name == "relaxed" and not numbers:
            return Relaxed()
        if name == "relaxed" and len(numbers) == 2 and numbers[0].is_integer():
            return Relaxed(int(numbers[0]), numbers[1])
        if name == "synthetic" and len(numbers) == 1:
            return Synthetic(numbers[0])
    except (ValueError, OverflowError) as error:
        if isinstance(error, RequestError):
            raise
    raise RequestError(field="acceptance", found=text, allowed="exact, relaxed, relaxed:N,DELTA or synthetic:RATE")
