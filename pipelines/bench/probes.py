"""The timers of a benchmark: of a compiled program alone, and of the host between two calls."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import jax

from dspark_jax.pipelines.speculative.engine import Engine, Request
from dspark_jax.pipelines.speculative.probe import ProgramProbe

Key = TypeVar("Key", bound=Hashable)


def seconds_of(call: Callable[[], Any]) -> float:
    """Wall seconds until the results of `call` are ready."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def alternating_medians(variants: Mapping[Key, Callable[[], Any]], repeats: int) -> dict[Key, float]:
    """Median seconds of each variant, over `repeats` calls after an untimed one.

    The variants are called in turn, so that changes in the speed of the machine affect them all.
    """
    for call in variants.values():
        jax.block_until_ready(call())
    times: dict[Key, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, call in variants.items():
            times[name].append(seconds_of(call))
    return {name: statistics.median(values) for name, values in times.items()}


class RoundClock:
    """Times the rounds of one program alone, by page count."""

    def __init__(self, probe: ProgramProbe) -> None:
        self._probe = probe
        self.times: dict[int, list[float]] = {}

    def measure(self, num_pages: int) -> None:
        """Time one call and add its seconds per round. The first call with a page count compiles and is not timed."""
        if num_pages not in self.times:
            self.times[num_pages] = []
            self._probe.run_rounds(num_pages)
        seconds, rounds = self._probe.run_rounds(num_pages)
        self.times[num_pages].append(seconds / rounds)

    def medians(self) -> dict[int, float]:
        """Median seconds per round, by page count."""
        return {num_pages: statistics.median(values) for num_pages, values in self.times.items()}

    def seconds_of_empty_call(self, num_pages: int) -> float:
        """Seconds of a call that runs no round: flattening, dispatch, donation and return of the same arguments."""
        return self._probe.run_empty(num_pages)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamSeconds:
    """Seconds per round with one call per round."""

    wall: float
    between_calls: float  # from ready results to the next call: reading results, scheduling, callbacks


def stream_seconds(engine: Engine, request: Request) -> StreamSeconds:
    """Run one request with one call per round."""
    completion, rounds = engine.timed_stream(request)
    gaps = [later.entered - earlier.ready for earlier, later in itertools.pairwise(rounds)]
    return StreamSeconds(
        wall=completion.decode_seconds / max(len(completion.rounds), 1),
        between_calls=statistics.median(gaps) if gaps else 0.0,
    )
