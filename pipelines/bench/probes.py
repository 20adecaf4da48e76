"""Clocks of a benchmark: a compiled program timed alone, and the host between two calls."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp

from dspark_jax.architectures.nn.attention.kv_cache import KVPages
from dspark_jax.architectures.protocols import Draft, Target
from dspark_jax.pipelines.speculative.engine import Engine, Request
from dspark_jax.pipelines.speculative.programs import Programs
from dspark_jax.pipelines.speculative.state import RoundOutput, RoundState, empty_state

Key = TypeVar("Key", bound=Hashable)
_NO_END = 1 << 20  # a budget that no probe uses up


def seconds_of(call: Callable[[], Any]) -> float:
    """Wall seconds until the results of `call` are ready."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def alternating_medians(variants: Mapping[Key, Callable[[], Any]], repeats: int) -> dict[Key, float]:
    """Median seconds of each call. One untimed call each, then all in turn: a slow spell of the machine hits every
    variant.
    """
    for call in variants.values():
        jax.block_until_ready(call())
    times: dict[Key, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, call in variants.items():
            times[name].append(seconds_of(call))
    return {name: statistics.median(values) for name, values in times.items()}


class ProgramProbe:
    """Times the device loop of `programs` on one live row that never ends, by page count.

    The cost of a round depends on shapes alone, so the row needs no prompt: its caches are zeros. With a `num_drafts`
    and programs that were built without a draft, a round verifies `num_drafts` stale drafts and proposes none: it is
    the same round without drafting.
    """

    def __init__(
        self,
        programs: Programs,
        target: Target,
        draft: Draft | None,
        *,
        num_pages: int,
        num_drafts: int,
        max_stop_ids: int,
        threshold: float = 0.0,
    ) -> None:
        self._programs = programs
        pages = KVPages.zeros(target.kv_params(programs.page_size), num_pages)
        draft_pages = None if draft is None else KVPages.zeros(draft.kv_params(programs.page_size), num_pages)
        state = empty_state(
            pages, draft_pages, num_rows=1, pages_per_row=num_pages, num_drafts=num_drafts, num_stop_ids=max_stop_ids
        )
        self._state = dataclasses.replace(
            state,
            page_table=jnp.arange(num_pages, dtype=jnp.int32)[None, :],
            confidence_threshold=jnp.full((1,), threshold, jnp.float32),
        )
        self._num_drafts = num_drafts
        self.times: dict[int, list[float]] = {}  # seconds per round, by page count

    def measure(self, num_pages: int) -> None:
        """Add one timing, over as many rounds as one call runs; the first of a page count is preceded by an untimed
        call.
        """
        if num_pages not in self.times:
            self.times[num_pages] = []
            self._call(num_pages, live=True)
        seconds, rounds = self._call(num_pages, live=True)
        self.times[num_pages].append(seconds / rounds)

    def medians(self) -> dict[int, float]:
        """Median seconds per round, by page count."""
        return {num_pages: statistics.median(values) for num_pages, values in self.times.items()}

    def seconds_of_empty_call(self, num_pages: int) -> float:
        """A call that runs no round: flattening, dispatch, donation and return of the very arguments that a
        round has.
        """
        return self._call(num_pages, live=False)[0]

    def _call(self, num_pages: int, *, live: bool) -> tuple[float, int]:
        start = num_pages * self._programs.page_size // 4
        state: RoundState = jax.block_until_ready(
            dataclasses.replace(
                self._state,
                committed=jnp.full((1,), start, jnp.int32),
                remaining=jnp.full((1,), _NO_END, jnp.int32),
                num_drafts=jnp.full((1,), self._num_drafts, jnp.int32),
                finished=jnp.full((1,), not live),
            )
        )
        started = time.perf_counter()
        self._state, output = self._programs.loop(state, num_pages=num_pages, until_any_finishes=False)
        jax.block_until_ready((self._state, output))
        return time.perf_counter() - started, int(output.num_rounds[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamSeconds:
    """The one-round-a-call driver, per round."""

    wall: float
    between_calls: float  # from results that are ready to the entry of the next call: fetching, bookkeeping, callbacks


def stream_seconds(engine: Engine, request: Request) -> StreamSeconds:
    """Run one request round by round. The engine waits for each result inside the timed call, where it would otherwise
    wait while fetching it.
    """
    stamped = _StampedPrograms(engine.programs)
    engine.programs = cast(Programs, stamped)
    try:
        completion = engine.generate([request], stream=True)[0]
    finally:
        engine.programs = stamped.programs
    gaps = [entered - ready for entered, ready in zip(stamped.entered[1:], stamped.ready, strict=False)]
    return StreamSeconds(
        wall=completion.decode_seconds / max(len(completion.rounds), 1),
        between_calls=statistics.median(gaps) if gaps else 0.0,
    )


class _StampedPrograms:
    """An engine's programs, and when each round was asked for and ready."""

    def __init__(self, programs: Programs) -> None:
        self.programs = programs
        self.entered: list[float] = []
        self.ready: list[float] = []

    def round(self, state: RoundState, *, num_pages: int) -> tuple[RoundState, RoundOutput]:
        self.entered.append(time.perf_counter())
        results = jax.block_until_ready(self.programs.round(state, num_pages=num_pages))
        self.ready.append(time.perf_counter())
        return cast(tuple[RoundState, RoundOutput], results)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.programs, name)
