"""Measures what packed verification saves: rounds of several rows, with each compiled length of the flat batch."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from dspark_jax.pipelines.bench.figures import ModeFigures
from dspark_jax.pipelines.speculative.engine import Engine

NUM_ROWS = 8
_ROUNDS, _REPEATS = 4, 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedRounds:
    """Rounds of `num_rows` rows by length of the flat batch, ascending. The last has room for every draft."""

    num_speculative_tokens: int
    num_rows: int
    offered: float  # share of drafts offered at the threshold, over all prompts
    num_tokens: tuple[int, ...]  # lengths of the flat batch
    seconds: tuple[float, ...]  # per round, median, for each length

    @property
    def relative(self) -> tuple[float, ...]:
        """Time of each / time of the longest."""
        return tuple(seconds / self.seconds[-1] for seconds in self.seconds)


def packed_rounds(engine: Engine, speculative: ModeFigures) -> PackedRounds:
    """Time the rounds of the engine's pair on `NUM_ROWS` rows, with all lengths in turn.

    `speculative` are the figures of the decoded prompts at the threshold.
    """
    drafts = engine.plan.num_speculative_tokens
    options = dataclasses.replace(engine.options, batch_size=NUM_ROWS)
    lengths = dataclasses.replace(engine.plan, options=options).token_buckets
    probes = [engine.probe(NUM_ROWS, num_tokens=length) for length in lengths]
    pages = engine.plan.page_buckets[0]
    times: Sequence[list[float]] = [[] for _ in probes]
    for repeat in range(_REPEATS + 1):
        for probe, seconds in zip(probes, times, strict=True):
            taken = probe.run_packed(pages, _ROUNDS)
            if repeat:  # the first call compiles
                seconds.append(taken / _ROUNDS)
    possible = drafts * speculative.rounds
    return PackedRounds(
        num_speculative_tokens=drafts,
        num_rows=NUM_ROWS,
        offered=sum(speculative.offered) / possible if possible else 0.0,
        num_tokens=lengths,
        seconds=tuple(statistics.median(seconds) for seconds in times),
    )
