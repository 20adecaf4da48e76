"""Measures what the controls of sampling cost in a round, against the greedy round of the same engine."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from dspark_jax.pipelines.sampling.generation import Generation
from dspark_jax.pipelines.speculative.engine import Engine
from dspark_jax.pipelines.speculative.sizes import ProposalKind

_REPEATS = 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledRounds:
    """Seconds of a round in the device loop, medians, by number of rows."""

    num_speculative_tokens: int
    proposal: ProposalKind
    greedy: Mapping[int, float]
    sampled: Mapping[int, float]

    def ratio(self, num_rows: int) -> float:
        """A round with the controls / a greedy round."""
        return self.sampled[num_rows] / self.greedy[num_rows]


def sampled_rounds(engine: Engine, generation: Generation, rows: Sequence[int]) -> SampledRounds:
    """Time rounds of so many rows each, greedy and with the controls of `generation` in turn."""
    medians: dict[bool, dict[int, float]] = {False: {}, True: {}}
    pages = engine.plan.page_buckets[0]
    for num_rows in rows:
        probes = {controls: engine.probe(num_rows, generation=generation if controls else None) for controls in medians}
        times: dict[bool, list[float]] = {False: [], True: []}
        for repeat in range(_REPEATS + 1):
            for controls, probe in probes.items():
                seconds, rounds = probe.run_rounds(pages)
                if repeat:  # the first call compiles
                    times[controls].append(seconds / rounds)
        for controls, values in times.items():
            medians[controls][num_rows] = statistics.median(values)
    return SampledRounds(
        num_speculative_tokens=engine.plan.num_speculative_tokens,
        proposal=engine.options.proposal,
        greedy=medians[False],
        sampled=medians[True],
    )
