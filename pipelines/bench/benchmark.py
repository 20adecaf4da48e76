"""Measures plain and speculative decoding of one pair. Nothing is printed here.

All engines run in one process with the same loaded modules: one decodes plainly, and there is one for each k, at a
temperature one for each k and kind of proposal. They decode at batch 1, with the device loop, greedily or with the same
seed for every prompt. After warm-up every prompt is decoded by all engines in turn, on
every second repeat in the opposite order. Each repeat also times the compiled programs alone. The predicted speed-up,
tau / cost of a round, uses only these times, so it is independent of the decoding times that it is compared with.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from dspark_jax.pipelines.bench.figures import (
    ModeFigures,
    PageBuckets,
    ProgramSeconds,
    Run,
    SetFigures,
    compare,
    mean_seconds,
    mode_figures,
)
from dspark_jax.pipelines.bench.machine import (
    Machine,
    ReadProbe,
    Roofline,
    roofline,
    streamed_weight_bytes,
    this_machine,
)
from dspark_jax.pipelines.bench.options import ALL_SETS, BenchmarkOptions, PromptSet, check_benchmark
from dspark_jax.pipelines.bench.packed import PackedRounds, packed_rounds
from dspark_jax.pipelines.bench.probes import RoundClock, StreamSeconds, stream_seconds
from dspark_jax.pipelines.bench.sampled import SampledRounds, sampled_rounds
from dspark_jax.pipelines.checkpoints.loading import LoadedDraft, LoadedTarget
from dspark_jax.pipelines.compilation import CompileClock
from dspark_jax.pipelines.sampling.generation import Request
from dspark_jax.pipelines.sampling.policy import Policy
from dspark_jax.pipelines.speculative.engine import Engine
from dspark_jax.pipelines.speculative.sizes import EngineOptions, ProposalKind
from dspark_jax.speculators_common.errors import RequestError

_EMPTY_CALLS = 20
_SEED = 0  # of every prompt: all repeats and engines get the same random numbers
_SMALLEST_CACHE = 256  # positions that the engine's smallest program reads


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundFigures:
    """The round of one k on one prompt, timed in the device loop and in the driver with one call per round."""

    num_speculative_tokens: int
    proposal: ProposalKind
    plain_step_seconds: float  # timed alone in the device loop, as are the next two
    round_seconds: float
    verify_seconds: float  # the round without drafting
    stream_seconds: float  # wall time of a round with one call per round
    host_seconds: float  # part of `stream_seconds` on the host: a call that runs no round, and the time between calls
    host_share: float  # host_seconds / stream_seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStart:
    """Start-up of one engine."""

    num_speculative_tokens: int  # 0: plain
    proposal: ProposalKind
    num_programs: int
    seconds: float  # to compile all programs and run each once
    compile_seconds: float  # part of `seconds`: tracing, lowering, and compiling or reading from the cache
    from_cache: int  # executables that JAX's persistent cache held
    compiled: int  # executables that it did not hold; both are 0 without such a cache
    first_token_seconds: float  # of the first request, after the warm-up


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
    """All results."""

    settings: Mapping[str, Any]
    machine: Machine
    load_seconds: Mapping[str, float]  # target, draft
    starts: tuple[EngineStart, ...]
    start_to_first_token_seconds: float  # load, compile and prefill; of the last k if there is a draft
    plain: Mapping[str, ModeFigures]  # by set
    sets: tuple[SetFigures, ...]  # per k: each prompt set, then all of them together
    rounds: tuple[RoundFigures, ...]  # per k
    packed: tuple[PackedRounds, ...]  # per k; empty without a confidence threshold
    sampled: tuple[SampledRounds, ...]  # per k and kind of proposal; empty in greedy decoding
    roofline: Roofline

    @property
    def best(self) -> SetFigures | None:
        """The k with the highest ratio over all sets; `None` without a draft."""
        return max(
            (figures for figures in self.sets if figures.name == ALL_SETS),
            key=lambda figures: figures.ratio,
            default=None,
        )


def run_benchmark(
    target: LoadedTarget,
    draft: LoadedDraft | None,
    sets: Sequence[PromptSet],
    options: BenchmarkOptions | None = None,
    *,
    load_seconds: Mapping[str, float] | None = None,
    report_step: Callable[[str], None] = lambda step: None,
) -> Benchmark:
    """Measure one pair. `report_step` is called with a description of each step before it begins.

    Raises `RequestError` for options that the pair or the prompts do not allow.
    """
    options = options or BenchmarkOptions()
    bench = _Bench(target, draft, sets, options)
    starts = [bench.start(index, report_step) for index in range(len(bench.engines))]
    for repeat in range(options.repeats):
        bench.decode_all(repeat, report_step)
    plain = {prompt_set.name: mode_figures(bench.runs_of(prompt_set.name, 0)) for prompt_set in sets}
    plain[ALL_SETS] = mode_figures(bench.runs_of(ALL_SETS, 0))
    load_seconds = dict(load_seconds or {})
    last = starts[-1]
    return Benchmark(
        settings=bench.settings(),
        machine=this_machine(),
        load_seconds=load_seconds,
        starts=tuple(starts),
        start_to_first_token_seconds=sum(load_seconds.values()) + last.seconds + last.first_token_seconds,
        plain=plain,
        sets=tuple(bench.compared()),
        rounds=tuple(bench.round_figures()),
        packed=tuple(bench.packed(report_step)),
        sampled=tuple(bench.sampled(report_step)),
        roofline=bench.roofline(plain[ALL_SETS].seconds_per_round),
    )


class _Bench:
    """The engines (plain first, then one per k), their probes, and the runs so far. Engines are named by index."""

    def __init__(
        self, target: LoadedTarget, draft: LoadedDraft | None, sets: Sequence[PromptSet], options: BenchmarkOptions
    ) -> None:
        self.target, self.draft, self.sets, self.options = target, draft, sets, options
        self.ks = check_benchmark(target, draft, sets, options)
        page_size, headroom = EngineOptions().page_size, max(self.ks, default=0) + 1
        longest = max(len(ids) for prompt_set in sets for ids in prompt_set.prompts) + options.max_new_tokens
        # A power of two, so that the page buckets, and with them the cost of attention, are those of a larger engine.
        # The headroom is subtracted, so that they are the same for every k.
        positions = _SMALLEST_CACHE
        while positions < longest + headroom:
            positions *= 2
        self.engine_options = EngineOptions(max_seq_len=positions - headroom, max_stop_ids=max(8, len(target.stop_ids)))
        modes: list[tuple[int, ProposalKind]] = [(k, proposal) for k in self.ks for proposal in options.proposals]
        self.engines = [self._engine(0, "argmax"), *(self._engine(k, proposal) for k, proposal in modes)]
        assert len({engine.plan.page_buckets for engine in self.engines}) == 1
        self.buckets = PageBuckets(counts=self.engines[0].plan.page_buckets, page_size=page_size)
        self.rounds = [self._clock(engine, engine.plan.num_speculative_tokens) for engine in self.engines]
        # An engine without a draft, with drafts in its state, verifies them and drafts nothing.
        self.verifications = [self._clock(self.engines[0], k) for k in (0, *(k for k, _ in modes))]
        self.streams: dict[int, list[StreamSeconds]] = {index: [] for index in range(1, len(self.engines))}
        self.memory = ReadProbe(options.bandwidth_bytes)
        self.runs: dict[tuple[str, int, int], list[Run]] = {}  # (set, prompt, engine) -> repeats

    def start(self, index: int, report_step: Callable[[str], None]) -> EngineStart:
        """Compile all programs of an engine, then decode one prompt, of which only the first token is timed."""
        engine = self.engines[index]
        k = engine.plan.num_speculative_tokens
        report_step(f"compile {_mode(k)}")
        started = time.perf_counter()
        with CompileClock().watching() as clock:
            num_programs = engine.warmup(stream=False, policies=(Policy.of(self.options.sampling),))
        seconds = time.perf_counter() - started
        first = Run.of(engine.generate([self._request(self.sets[0].prompts[0])])[0])
        return EngineStart(
            num_speculative_tokens=k,
            proposal=engine.options.proposal,
            num_programs=num_programs,
            seconds=seconds,
            compile_seconds=clock.seconds(),
            from_cache=clock.from_cache,
            compiled=clock.compiled,
            first_token_seconds=first.first_token_seconds,
        )

    def decode_all(self, repeat: int, report_step: Callable[[str], None]) -> None:
        """One repeat: for each set, decode every prompt with every engine, then time the programs alone.

        The two alternate by set, so that changes in the speed of the machine affect both.
        """
        order = list(range(len(self.engines)))
        if repeat % 2:
            order.reverse()
        for prompt_set in self.sets:
            for index, ids in enumerate(prompt_set.prompts):
                report_step(
                    f"repeat {repeat + 1} of {self.options.repeats}: {prompt_set.name}, prompt {index + 1} of "
                    f"{len(prompt_set.prompts)}"
                )
                for engine_index in order:
                    run = Run.of(self.engines[engine_index].generate([self._request(ids)])[0])
                    self.runs.setdefault((prompt_set.name, index, engine_index), []).append(run)
            self._check_rounds(prompt_set)
            report_step(f"repeat {repeat + 1} of {self.options.repeats}: {prompt_set.name}, programs alone")
            for num_pages in sorted(self._pages_used(prompt_set)):
                for engine_index in order:
                    self.memory.measure()
                    self.rounds[engine_index].measure(num_pages)
                    if engine_index:
                        self.verifications[engine_index].measure(num_pages)
        report_step(f"repeat {repeat + 1} of {self.options.repeats}: one call a round")
        _, _, ids = self._streamed_prompt()
        for index, streams in self.streams.items():
            if not streams:
                stream_seconds(self.engines[index], self._request(ids))  # compiles that driver's program
            streams.append(stream_seconds(self.engines[index], self._request(ids)))

    def compared(self) -> Iterator[SetFigures]:
        """Per k, the figures of each set and then of all of them together."""
        for index, engine in enumerate(self.engines[1:], start=1):
            seconds = ProgramSeconds(
                plain=self.rounds[0].medians(),
                round=self.rounds[index].medians(),
                verify=self.verifications[index].medians(),
            )
            for name in (*(prompt_set.name for prompt_set in self.sets), ALL_SETS):
                yield compare(
                    name,
                    self.runs_of(name, 0),
                    self.runs_of(name, index),
                    engine.plan.num_speculative_tokens,
                    seconds,
                    self.buckets,
                    proposal=engine.options.proposal,
                )

    def round_figures(self) -> Iterator[RoundFigures]:
        """Per k, the rounds of the prompt that was also decoded with one call per round."""
        name, prompt, _ = self._streamed_prompt()
        for index, streams in self.streams.items():
            k = self.engines[index].plan.num_speculative_tokens
            pages = self.buckets.of_run(self.runs[name, prompt, index][0], k)
            step_pages = self.buckets.of_run(self.runs[name, prompt, 0][0], 0)
            empty = statistics.median(self.rounds[index].seconds_of_empty_call(pages[0]) for _ in range(_EMPTY_CALLS))
            host = empty + statistics.median(stream.between_calls for stream in streams)
            wall = statistics.median(stream.wall for stream in streams)
            yield RoundFigures(
                num_speculative_tokens=k,
                proposal=self.engines[index].options.proposal,
                plain_step_seconds=mean_seconds(self.rounds[0].medians(), step_pages),
                round_seconds=mean_seconds(self.rounds[index].medians(), pages),
                verify_seconds=mean_seconds(self.verifications[index].medians(), pages),
                stream_seconds=wall,
                host_seconds=host,
                host_share=host / wall,
            )

    def packed(self, report_step: Callable[[str], None]) -> Iterator[PackedRounds]:
        """Per k, what packed verification saves with several rows. Nothing without a confidence threshold."""
        if not self.options.confidence_threshold:
            return
        for index, engine in enumerate(self.engines[1:], start=1):
            report_step(f"rounds of several rows, {_mode(engine.plan.num_speculative_tokens)}")
            yield packed_rounds(engine, mode_figures(self.runs_of(ALL_SETS, index)))

    def sampled(self, report_step: Callable[[str], None]) -> Iterator[SampledRounds]:
        """Per k and kind of proposal, what a round costs with the controls. Nothing in greedy decoding."""
        if not self.options.sampling.samples:
            return
        for engine in self.engines[1:]:
            report_step(f"rounds with and without controls, {_mode(engine.plan.num_speculative_tokens)}")
            yield sampled_rounds(engine, self.options.sampling, self.options.sampled_rows)

    def roofline(self, step_seconds: float) -> Roofline:
        """The bound that the measured memory bandwidth sets to a plain step of `step_seconds`."""
        weight_bytes = streamed_weight_bytes(self.target.checkpoint, self.options.dtype)
        return roofline(weight_bytes, self.memory.bytes_per_second(), self.memory.best_bytes_per_second(), step_seconds)

    def runs_of(self, name: str, engine_index: int) -> list[list[Run]]:
        """The runs of one engine on the prompts of one set, or of all sets for `ALL_SETS`."""
        return [
            repeats
            for (owner, _, index), repeats in self.runs.items()
            if index == engine_index and name in (owner, ALL_SETS)
        ]

    def settings(self) -> dict[str, Any]:
        """The options and the sizes of the engines."""
        options, draft = self.options, self.draft
        return {
            "target": str(self.target.checkpoint.path),
            "target_architecture": self.target.checkpoint.architecture,
            "draft": None if draft is None else str(draft.checkpoint.path),
            "draft_architecture": None if draft is None else draft.checkpoint.architecture,
            "dtype": jnp.dtype(options.dtype).name,
            "num_speculative_tokens": [engine.plan.num_speculative_tokens for engine in self.engines[1:]],
            "confidence_threshold": options.confidence_threshold,
            "sampling": options.sampling.described,
            "driver": "device loop",
            "batch_size": 1,
            "max_new_tokens": options.max_new_tokens,
            "repeats": options.repeats,
            # Lengths in tokens.
            "prompts": {prompt_set.name: [len(ids) for ids in prompt_set.prompts] for prompt_set in self.sets},
            "stop_ids": list(self.target.stop_ids),
            "page_size": self.buckets.page_size,
            "page_buckets": list(self.buckets.counts),
            "rounds_per_call": self.engine_options.rounds_per_call,
        }

    def _engine(self, k: int, proposal: ProposalKind) -> Engine:
        draft = None if self.draft is None or not k else self.draft.module
        options = dataclasses.replace(self.engine_options, num_speculative_tokens=k or None, proposal=proposal)
        return Engine(self.target.module, draft, options)

    def _clock(self, engine: Engine, num_verified: int) -> RoundClock:
        threshold = self.options.confidence_threshold if engine.plan.num_speculative_tokens else 0.0
        return RoundClock(
            engine.probe(
                num_verified=num_verified,
                generation=dataclasses.replace(self.options.sampling, confidence_threshold=threshold),
            )
        )

    def _request(self, ids: tuple[int, ...]) -> Request:
        return Request(
            prompt_ids=ids,
            generation=dataclasses.replace(
                self.options.sampling,
                max_new_tokens=self.options.max_new_tokens,
                stop_ids=self.target.stop_ids,
                confidence_threshold=self.options.confidence_threshold,
                seed=_SEED,
            ),
        )

    def _prompts(self) -> Iterator[tuple[str, int, tuple[int, ...]]]:
        for prompt_set in self.sets:
            for index, ids in enumerate(prompt_set.prompts):
                yield prompt_set.name, index, ids

    def _check_rounds(self, prompt_set: PromptSet) -> None:
        for index in range(len(self.engines)):
            if not any(repeats[0].rounds for repeats in self.runs_of(prompt_set.name, index)):
                raise RequestError(
                    "every prompt ended with its first token, allowed a set with something to decode",
                    file=prompt_set.name,
                    allowed="a set with something to decode",
                )

    def _streamed_prompt(self) -> tuple[str, int, tuple[int, ...]]:
        """(set, index, ids) of the prompt with the longest plain output, the first of them."""
        return max(self._prompts(), key=lambda prompt: len(self.runs[prompt[0], prompt[1], 0][0].rounds))

    def _pages_used(self, prompt_set: PromptSet) -> set[int]:
        used: set[int] = set()
        for index, engine in enumerate(self.engines):
            for repeats in self.runs_of(prompt_set.name, index):
                used.update(self.buckets.of_run(repeats[0], engine.plan.num_speculative_tokens))
        return used


def _mode(k: int) -> str:
    return f"{k} drafts" if k else "plain"
