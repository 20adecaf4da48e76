"""Plain against speculative decoding of one pair: measured, not printed.

One process, the same loaded modules, one engine per way of decoding, batch of one, greedy, device loop. After warm-up
every prompt is decoded by all engines in turn, in the opposite order on odd repeats. Each repeat also times the
compiled programs alone, so that the predicted speed-up, tau over the cost of a round, owes nothing to the runs that it
is held against.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

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
from dspark_jax.pipelines.bench.packed import PackedRounds, packed_rounds
from dspark_jax.pipelines.bench.probes import RoundClock, StreamSeconds, stream_seconds
from dspark_jax.pipelines.checkpoints.loading import AnyDraft, AnyTarget, LoadedDraft, LoadedTarget
from dspark_jax.pipelines.compilation import CompileClock
from dspark_jax.pipelines.requests import check_threshold
from dspark_jax.pipelines.speculative.engine import Engine
from dspark_jax.pipelines.speculative.generation import Generation, Request
from dspark_jax.pipelines.speculative.sizes import EngineOptions, drafts_per_round
from dspark_jax.speculators_common.errors import RequestError

ALL_SETS = "all"
_EMPTY_CALLS = 20
_SMALLEST_CACHE = 256  # positions; the engine's smallest program reads as many


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptSet:
    """Prompts that are reported together."""

    name: str
    prompts: tuple[tuple[int, ...], ...]  # token ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    """What is varied. `num_speculative_tokens`: each value is measured; empty = all drafts of the block."""

    num_speculative_tokens: tuple[int, ...] = ()
    max_new_tokens: int = 96
    repeats: int = 3
    confidence_threshold: float = 0.0
    dtype: DTypeLike = jnp.bfloat16  # what the modules were loaded with
    bandwidth_bytes: int = 1 << 29  # size of the array that the read bandwidth is measured on


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundFigures:
    """The round of one k on one prompt: in the device loop, and in the driver that makes one call per round, to which
    the host's share belongs.
    """

    num_speculative_tokens: int
    plain_step_seconds: float  # these three timed alone in the device loop
    round_seconds: float
    verify_seconds: float  # the round without drafting
    stream_seconds: float  # one call per round: wall time of a round
    host_seconds: float  # of it outside the executable: a call that runs no round + the time between two calls
    host_share: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStart:
    """Start-up of one engine. `first_token_seconds` is that of its first request, after the warm-up."""

    num_speculative_tokens: int  # 0: plain
    num_programs: int
    seconds: float  # to compile all programs and run each once
    compile_seconds: float  # of it tracing, lowering, and compiling or fetching
    from_cache: int  # executables that JAX's persistent cache held
    compiled: int  # those that it did not hold; both 0 without such a cache
    first_token_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Everything measured. `sets` holds, per k, each prompt set and then all of them together."""

    settings: Mapping[str, Any]
    machine: Machine
    load_seconds: Mapping[str, float]  # target, draft
    starts: tuple[EngineStart, ...]
    start_to_first_token_seconds: (
        float  # loading, compiling and the first prompt of one engine: the speculative one if there is one
    )
    plain: Mapping[str, ModeFigures]  # by set
    sets: tuple[SetFigures, ...]
    rounds: tuple[RoundFigures, ...]
    packed: tuple[PackedRounds, ...]  # per k, where a confidence threshold shortens proposals
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
    tell: Callable[[str], None] = lambda step: None,
) -> Benchmark:
    """Measure; `tell` is called before every step with what it is. Raises `RequestError` for options that the pair or
    the prompts do not allow.
    """
    options = options or BenchmarkOptions()
    bench = _Bench(target, draft, sets, options)
    starts = [bench.start(index, tell) for index in range(len(bench.engines))]
    for repeat in range(options.repeats):
        bench.decode_all(repeat, tell)
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
        packed=tuple(bench.packed(tell)),
        roofline=bench.roofline(plain[ALL_SETS].seconds_per_round),
    )


class _Bench:
    """The engines (plain first, then one per k), their probes, and the runs so far."""

    def __init__(
        self, target: LoadedTarget, draft: LoadedDraft | None, sets: Sequence[PromptSet], options: BenchmarkOptions
    ) -> None:
        self.target, self.draft, self.sets, self.options = target, draft, sets, options
        widths = check_benchmark(target, draft, sets, options)
        page_size, headroom = EngineOptions().page_size, max(widths, default=0) + 1
        longest = max(len(ids) for prompt_set in sets for ids in prompt_set.prompts) + options.max_new_tokens
        # A power of two, so that page counts, and with them what attention costs, are those of an engine with room for
        # much more. The headroom is taken off, so that they are the same for every k.
        positions = _SMALLEST_CACHE
        while positions < longest + headroom:
            positions *= 2
        self.engine_options = EngineOptions(max_seq_len=positions - headroom, max_stop_ids=max(8, len(target.stop_ids)))
        self.engines = [self._engine(0), *(self._engine(width) for width in widths)]
        assert len({engine.plan.page_buckets for engine in self.engines}) == 1
        self.buckets = PageBuckets(counts=self.engines[0].plan.page_buckets, page_size=page_size)
        self.rounds = [self._clock(engine, engine.plan.num_speculative_tokens) for engine in self.engines]
        # Without a draft but with drafts in the state, a round verifies and does not draft.
        self.verifications = [self._clock(self.engines[0], width) for width in (0, *widths)]
        self.streams: dict[int, list[StreamSeconds]] = {index: [] for index in range(1, len(self.engines))}
        self.memory = ReadProbe(options.bandwidth_bytes)
        self.runs: dict[tuple[str, int, int], list[Run]] = {}  # (set, prompt, engine) -> repeats

    def start(self, index: int, tell: Callable[[str], None]) -> EngineStart:
        """Compile everything that engine `index` needs, then decode one prompt, untimed but for its first token."""
        engine = self.engines[index]
        width = engine.plan.num_speculative_tokens
        tell(f"compile {_mode(width)}")
        started = time.perf_counter()
        with CompileClock().watching() as clock:
            num_programs = engine.warmup(stream=False)
        seconds = time.perf_counter() - started
        first = Run.of(engine.generate([self._request(self.sets[0].prompts[0])])[0])
        return EngineStart(
            num_speculative_tokens=width,
            num_programs=num_programs,
            seconds=seconds,
            compile_seconds=clock.seconds(),
            from_cache=clock.from_cache,
            compiled=clock.compiled,
            first_token_seconds=first.first_token_seconds,
        )

    def decode_all(self, repeat: int, tell: Callable[[str], None]) -> None:
        """One repeat: set by set every prompt by every engine, then the programs alone, so that both see the same
        spells of the machine.
        """
        order = list(range(len(self.engines)))
        if repeat % 2:
            order.reverse()
        for prompt_set in self.sets:
            for index, ids in enumerate(prompt_set.prompts):
                tell(
                    f"repeat {repeat + 1} of {self.options.repeats}: {prompt_set.name}, prompt {index + 1} of "
                    f"{len(prompt_set.prompts)}"
                )
                for engine in order:
                    run = Run.of(self.engines[engine].generate([self._request(ids)])[0])
                    self.runs.setdefault((prompt_set.name, index, engine), []).append(run)
            self._check_rounds(prompt_set)
            tell(f"repeat {repeat + 1} of {self.options.repeats}: {prompt_set.name}, programs alone")
            for num_pages in sorted(self._pages_used(prompt_set)):
                for engine in order:
                    self.memory.measure()
                    self.rounds[engine].measure(num_pages)
                    if engine:
                        self.verifications[engine].measure(num_pages)
        tell(f"repeat {repeat + 1} of {self.options.repeats}: one call a round")
        _, _, ids = self._streamed_prompt()
        for index, streams in self.streams.items():
            if not streams:
                stream_seconds(self.engines[index], self._request(ids))  # compiles that driver's program
            streams.append(stream_seconds(self.engines[index], self._request(ids)))

    def compared(self) -> Iterator[SetFigures]:
        """Per k, the sets and then all of them together."""
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
                )

    def round_figures(self) -> Iterator[RoundFigures]:
        """Per k, the rounds of the prompt that the streaming driver ran, too."""
        name, prompt, _ = self._streamed_prompt()
        for index, streams in self.streams.items():
            width = self.engines[index].plan.num_speculative_tokens
            pages = self.buckets.of_run(self.runs[name, prompt, index][0], width)
            step_pages = self.buckets.of_run(self.runs[name, prompt, 0][0], 0)
            empty = statistics.median(self.rounds[index].seconds_of_empty_call(pages[0]) for _ in range(_EMPTY_CALLS))
            host = empty + statistics.median(stream.between_calls for stream in streams)
            wall = statistics.median(stream.wall for stream in streams)
            yield RoundFigures(
                num_speculative_tokens=width,
                plain_step_seconds=mean_seconds(self.rounds[0].medians(), step_pages),
                round_seconds=mean_seconds(self.rounds[index].medians(), pages),
                verify_seconds=mean_seconds(self.verifications[index].medians(), pages),
                stream_seconds=wall,
                host_seconds=host,
                host_share=host / wall,
            )

    def packed(self, tell: Callable[[str], None]) -> Iterator[PackedRounds]:
        """Per k, what short proposals save several rows."""
        if not self.options.confidence_threshold:
            return
        for index, engine in enumerate(self.engines[1:], start=1):
            tell(f"rounds of several rows, {_mode(engine.plan.num_speculative_tokens)}")
            yield packed_rounds(engine, mode_figures(self.runs_of(ALL_SETS, index)))

    def roofline(self, step_seconds: float) -> Roofline:
        """The bound that this run's memory sets to a plain step."""
        weight_bytes = streamed_weight_bytes(self.target.checkpoint, self.options.dtype)
        return roofline(weight_bytes, self.memory.bytes_per_second(), self.memory.best_bytes_per_second(), step_seconds)

    def runs_of(self, name: str, engine: int) -> list[list[Run]]:
        """The runs by one engine of the prompts of one set, or of all."""
        return [
            repeats for (owner, _, index), repeats in self.runs.items() if index == engine and name in (owner, ALL_SETS)
        ]

    def settings(self) -> dict[str, Any]:
        """What was asked for and what the engines made of it."""
        options, draft = self.options, self.draft
        return {
            "target": str(self.target.checkpoint.path),
            "target_architecture": self.target.checkpoint.architecture,
            "draft": None if draft is None else str(draft.checkpoint.path),
            "draft_architecture": None if draft is None else draft.checkpoint.architecture,
            "dtype": jnp.dtype(options.dtype).name,
            "num_speculative_tokens": [engine.plan.num_speculative_tokens for engine in self.engines[1:]],
            "confidence_threshold": options.confidence_threshold,
            "sampling": "greedy",
            "driver": "device loop",
            "batch_size": 1,
            "max_new_tokens": options.max_new_tokens,
            "repeats": options.repeats,
            "prompts": {
                prompt_set.name: [len(ids) for ids in prompt_set.prompts] for prompt_set in self.sets
            },  # lengths in tokens
            "stop_ids": list(self.target.stop_ids),
            "page_size": self.buckets.page_size,
            "page_buckets": list(self.buckets.counts),
            "rounds_per_call": self.engine_options.rounds_per_call,
        }

    def _engine(self, width: int) -> Engine:
        draft = None if self.draft is None or not width else self.draft.module
        return Engine(
            self.target.module, draft, dataclasses.replace(self.engine_options, num_speculative_tokens=width or None)
        )

    def _clock(self, engine: Engine, num_drafts: int) -> RoundClock:
        threshold = self.options.confidence_threshold if engine.plan.num_speculative_tokens else 0.0
        return RoundClock(engine.probe(num_drafts=num_drafts, threshold=threshold))

    def _request(self, ids: tuple[int, ...]) -> Request:
        return Request(
            prompt_ids=ids,
            generation=Generation(
                max_new_tokens=self.options.max_new_tokens,
                stop_ids=self.target.stop_ids,
                confidence_threshold=self.options.confidence_threshold,
            ),
        )

    def _prompts(self) -> Iterator[tuple[str, int, tuple[int, ...]]]:
        for prompt_set in self.sets:
            for index, ids in enumerate(prompt_set.prompts):
                yield prompt_set.name, index, ids

    def _check_rounds(self, prompt_set: PromptSet) -> None:
        for engine in range(len(self.engines)):
            if not any(repeats[0].rounds for repeats in self.runs_of(prompt_set.name, engine)):
                raise RequestError(
                    f"{prompt_set.name}: every prompt ended with its first token, allowed a set with something to "
                    "decode"
                )

    def _streamed_prompt(self) -> tuple[str, int, tuple[int, ...]]:
        """The prompt with the longest plain output, the first of them."""
        return max(self._prompts(), key=lambda prompt: len(self.runs[prompt[0], prompt[1], 0][0].rounds))

    def _pages_used(self, prompt_set: PromptSet) -> set[int]:
        used: set[int] = set()
        for index, engine in enumerate(self.engines):
            for repeats in self.runs_of(prompt_set.name, index):
                used.update(self.buckets.of_run(repeats[0], engine.plan.num_speculative_tokens))
        return used


def _mode(num_drafts: int) -> str:
    return f"{num_drafts} drafts" if num_drafts else "plain"


def check_benchmark(
    target: AnyTarget, draft: AnyDraft | None, sets: Sequence[PromptSet], options: BenchmarkOptions
) -> tuple[int, ...]:
    """The k to measure, each once, in the order given. Raises `RequestError` for options that the pair or the prompts
    do not allow.
    """
    _check_prompts(target, sets, options)
    asked = tuple(dict.fromkeys(options.num_speculative_tokens))
    check_threshold(options.confidence_threshold, None if draft is None else draft.config)
    if draft is None:
        if asked:
            raise RequestError(
                f"found {', '.join(map(str, asked))}, allowed only with a draft", field="num_speculative_tokens"
            )
        return ()
    for width in asked:
        drafts_per_round(draft.config, width)
    return asked or (draft.config.max_drafts,)


def _check_prompts(target: AnyTarget, sets: Sequence[PromptSet], options: BenchmarkOptions) -> None:
    if options.max_new_tokens < 2:
        raise RequestError(
            f"found {options.max_new_tokens}, allowed 2 or more: the first token belongs to no round",
            field="max_new_tokens",
        )
    if options.repeats < 1:
        raise RequestError(f"found {options.repeats}, allowed 1 or more", field="repeats")
    if not sets or any(not prompt_set.prompts for prompt_set in sets):
        raise RequestError("found none in a set, allowed at least one set and one prompt in each", field="prompts")
    names = [prompt_set.name for prompt_set in sets]
    if len({*names, ALL_SETS}) <= len(names):
        raise RequestError(
            f"found sets {', '.join(names)}, allowed different names, none of them {ALL_SETS!r}", field="prompts"
        )
    limit = target.config.max_position_embeddings
    for prompt_set in sets:
        for index, ids in enumerate(prompt_set.prompts):
            if len(ids) + options.max_new_tokens > limit:
                found = f"{len(ids)} tokens and {options.max_new_tokens} new ones"
                raise RequestError(
                    f"{prompt_set.name}: prompt {index + 1}: found {found}, allowed {limit} together "
                    "(max_position_embeddings)"
                )
