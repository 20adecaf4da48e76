"""Requests in, tokens out: a scheduler decides, a runner runs, events say what happened.

`submit`, `cancel` and `step` are what a server needs; `run` and `generate` are loops over them. The host sees committed
tokens only. While it reads the tokens of one program the next one may be on the device already.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np

from dspark_jax.architectures.protocols import Draft, Target
from dspark_jax.pipelines.speculative.completion import Completion
from dspark_jax.pipelines.speculative.generation import Generation, Request
from dspark_jax.pipelines.speculative.loop import LoopOutput
from dspark_jax.pipelines.speculative.probe import ProgramProbe, RoundTimes
from dspark_jax.pipelines.speculative.runner import Runner
from dspark_jax.pipelines.speculative.scheduler import Job, RequestId, Scheduler
from dspark_jax.pipelines.speculative.sizes import EngineOptions, EnginePlan
from dspark_jax.pipelines.speculative.state import NO_TOKEN, RoundOutput
from dspark_jax.speculators_common.errors import RequestError

__all__ = ["Completion", "Engine", "EngineOptions", "Event", "OnTokens", "Request"]

OnTokens = Callable[[int, Sequence[int]], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """New tokens of a request; with a `finish_reason` in the completion it has ended, and this is its last event."""

    id: RequestId
    tokens: tuple[int, ...]
    completion: Completion

    @property
    def is_end(self) -> bool:
        """No more events of this request will come."""
        return self.completion.finish_reason is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Flight:
    """A program that was started and whose results were not read yet. `jobs`: whose row each row of the output is."""

    output: RoundOutput | LoopOutput
    jobs: Mapping[int, Job]


@dataclasses.dataclass(kw_only=True)
class Counters:
    """What an engine has started, from its beginning on."""

    prompt_chunks: int = 0  # of one row alone
    mixed_steps: int = 0  # prompt tokens of some rows beside a round of others
    round_calls: int = 0  # programs of one round or many
    packed_calls: int = 0  # of these: with fewer places than all drafts need
    sent_back: int = 0  # rows that gave their pages away


class Engine:
    """Runs requests on a (target, draft) pair; without a draft it decodes plainly, by the same programs."""

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        options: EngineOptions | None = None,
        *,
        plan: EnginePlan | None = None,
    ) -> None:
        self.plan = plan or plan_of(target, draft, options or EngineOptions())
        self.options = self.plan.options
        self.runner = Runner(target, draft, self.plan)
        self._scheduler = Scheduler(self.plan)
        self.counters = Counters()
        self._flights: collections.deque[_Flight] = collections.deque()
        self._ended: list[Event] = []  # by `cancel`
        self._next_id = 0

    @property
    def has_work(self) -> bool:
        """A request waits or runs, or events of one that ended were not handed out yet."""
        return bool(self._ended or self._flights or self._scheduler.waiting or any(self._scheduler.rows))

    @property
    def num_running(self) -> int:
        """Rows in use."""
        return sum(1 for _ in self._scheduler.live())

    @property
    def num_free_pages(self) -> int:
        """Pages that no request holds."""
        return self._scheduler.pool.num_free

    def submit(self, request: Request) -> RequestId:
        """Queue a request. Raises a `RequestError` for one that cannot be served."""
        self.plan.check(request)
        identifier, self._next_id = self._next_id, self._next_id + 1
        completion = Completion(request=request, allowed_new_tokens=self.plan.allowed_new_tokens(request))
        self._scheduler.submit(Job(id=identifier, completion=completion))
        return identifier

    def cancel(self, identifier: RequestId) -> bool:
        """End a request where it is; the tokens so far are in its last event. False if it is not known, or over."""
        for job in self._scheduler.waiting:
            if job.id == identifier:
                self._scheduler.waiting.remove(job)
                return self._end(job)
        for row, job in self._scheduler.live():
            if job.id == identifier:
                self._scheduler.release(row)
                self.runner.retire([row])
                return self._end(job)
        return False

    def step(self, *, stream: bool = True) -> list[Event]:
        """Do some work and say what came of it. With `stream` rows decode one round a program, otherwise many.

        Programs are started only when the results of all earlier ones were read, so that what the host decides on is
        true.
        """
        if self._ended:
            events, self._ended = self._ended, []
            return events
        if not self._flights:
            self._start(stream)
        return self._land(self._flights.popleft()) if self._flights else []

    def run(
        self, requests: Sequence[Request], *, stream: bool = False, on_tokens: OnTokens | None = None
    ) -> Iterator[tuple[int, Completion]]:
        """Yield `(request index, completion)` as requests finish. With `stream` the host sees every round, otherwise
        every device loop.

        `on_tokens(index, ids)` gets the tokens of a request as they reach the host. A request that would pass
        `max_seq_len` ends there with reason `length`.
        """
        if self.has_work:
            raise RequestError("engine: found a run in progress, allowed one at a time: finish or close it first")
        for request in requests:
            self.plan.check(request)
        index_of = {self.submit(request): index for index, request in enumerate(requests)}
        try:
            while self.has_work:
                for event in self.step(stream=stream):
                    if on_tokens is not None:
                        on_tokens(index_of[event.id], event.tokens)
                    if event.is_end:
                        yield index_of[event.id], event.completion
        finally:
            self._abandon()

    def generate(
        self, requests: Sequence[Request], *, stream: bool = False, on_tokens: OnTokens | None = None
    ) -> list[Completion]:
        """Run all requests; completions come in request order. See `run` for `stream` and `on_tokens`."""
        done: dict[int, Completion] = dict(self.run(requests, stream=stream, on_tokens=on_tokens))
        return [done[index] for index in range(len(requests))]

    def warmup(self, *, stream: bool | None = None) -> int:
        """Compile every program that a request can need, by running each on inert rows; returns how many. `stream`
        restricts the decode driver.
        """
        assert not self.has_work
        count, runner, plan = 0, self.runner, self.plan
        for num_pages in plan.page_buckets:
            for width in self.options.prefill_chunks:
                runner.prefill(0, (), width=width, is_last=False, num_pages=num_pages)
                count += 1
            if self.options.batch_size > 1:
                runner.mixed({}, last=(), width=self._mixed_width, num_pages=num_pages)
                count += 1
            for num_tokens in plan.token_buckets:
                if stream in (None, True):
                    runner.round(num_pages=num_pages, num_tokens=num_tokens)
                    count += 1
                if stream in (None, False):
                    runner.loop(num_pages=num_pages, num_tokens=num_tokens, until_any_finishes=False)
                    count += 1
        request = Request(prompt_ids=(0,), generation=Generation(max_new_tokens=1))
        runner.admit(0, Job(id=-1, completion=Completion(request=request, allowed_new_tokens=0)))
        runner.set_pages({})
        runner.retire([0])
        runner.wait()
        return count

    def probe(
        self,
        num_rows: int = 1,
        *,
        num_drafts: int | None = None,
        num_tokens: int | None = None,
        threshold: float = 0.0,
    ) -> ProgramProbe:
        """The device loop of this engine on rows of its own, to be timed. `num_drafts`: k if left out."""
        drafts = self.plan.num_speculative_tokens if num_drafts is None else num_drafts
        return ProgramProbe(
            self.runner.programs,
            self.plan,
            num_rows=num_rows,
            num_drafts=drafts,
            num_tokens=num_tokens,
            threshold=threshold,
        )

    def timed_stream(self, request: Request) -> tuple[Completion, list[RoundTimes]]:
        """Run one request round by round; each round is waited for inside its call, not while its results are read."""
        with self.runner.timing_rounds() as times:
            completion = self.generate([request], stream=True)[0]
        return completion, times

    @property
    def _mixed_width(self) -> int:
        return min(self.options.prefill_chunks)

    def _start(self, stream: bool) -> None:
        """Admit, then start prompts or a mixed step or rounds; each started program is a flight."""
        scheduler = self._scheduler
        for row, job in scheduler.admit():
            self.runner.admit(row, job)
        if any(job.is_prefilling for _, job in scheduler.live()):
            if any(not job.is_prefilling for _, job in scheduler.live()):
                self._start_mixed()
                return
            self._start_prompts()
        if any(scheduler.rows):
            self._start_rounds(stream)

    def _start_prompts(self) -> None:
        """Feed whole prompts, one row after the other: nothing decodes that would have to wait for them."""
        for row, job in sorted(self._scheduler.live(), key=lambda item: item[1].turn):
            for start, width in self._chunks(job.num_fed, len(job.to_feed)):
                end = min(start + width, len(job.to_feed))
                if self._reserve({row: end}):
                    is_last = end == len(job.to_feed)
                    ids = job.to_feed[start:end]
                    num_pages = self.plan.page_bucket(start + width)
                    output = self.runner.prefill(row, ids, width=width, is_last=is_last, num_pages=num_pages)
                    job.num_fed = end
                    self.counters.prompt_chunks += 1
                    if is_last:
                        self._flights.append(_Flight(output=output, jobs={0: job}))

    def _start_mixed(self) -> None:
        """One chunk of prompt tokens, of the rows that were admitted first, beside a round of the rows that decode."""
        width = self._mixed_width
        reach = {row: self._next_reach(job) for row, job in self._scheduler.live() if not job.is_prefilling}
        lengths: dict[int, int] = {}
        for row, job in sorted(self._scheduler.live(), key=lambda item: item[1].turn):
            if job.is_prefilling:
                lengths[row] = min(len(job.to_feed) - job.num_fed, width - sum(lengths.values()))
                reach[row] = job.num_fed + lengths[row]
        kept = self._reserve(reach)
        parts, last = {}, []
        for row, job in kept.items():
            if row in lengths:
                parts[row] = job.to_feed[job.num_fed : job.num_fed + lengths[row]]
                job.num_fed += lengths[row]
                if not job.is_prefilling:
                    last.append(row)
        if kept:
            num_pages = self.plan.page_bucket(max(reach[row] for row in kept))
            self.counters.mixed_steps += 1
            output = self.runner.mixed(parts, last=last, width=width, num_pages=num_pages)
            self._flights.append(_Flight(output=output, jobs=kept))

    def _start_rounds(self, stream: bool) -> None:
        scheduler, rounds = self._scheduler, 1 if stream else self.options.rounds_per_call
        kept = self._reserve({row: self._next_reach(job) for row, job in scheduler.live() if not job.is_prefilling})
        for row, job in kept.items():
            wanted = self._next_reach(job) + (rounds - 1) * self.plan.tokens_per_round
            scheduler.extend(row, min(wanted, scheduler.whole_need(job)))
        if not kept:
            return
        self._show_pages()
        num_tokens = self.plan.token_bucket(sum(1 + job.next_length for job in kept.values()))
        num_pages = self.plan.page_bucket(max(map(self._next_reach, kept.values())))
        self.counters.round_calls += 1
        self.counters.packed_calls += num_tokens < self.plan.token_buckets[-1]
        if stream:
            output: RoundOutput | LoopOutput = self.runner.round(num_pages=num_pages, num_tokens=num_tokens)
        else:
            output = self.runner.loop(
                num_pages=num_pages, num_tokens=num_tokens, until_any_finishes=bool(scheduler.waiting)
            )
        self._flights.append(_Flight(output=output, jobs=kept))

    def _next_reach(self, job: Job) -> int:
        """Positions that the job's next round writes to."""
        return job.committed + self.plan.tokens_per_round

    def _reserve(self, reach: Mapping[int, int]) -> dict[int, Job]:
        """Pages for the first `reach[row]` positions of rows; the jobs of the rows that still run after that.

        Rows that were admitted first are served first; rows that have to give their pages away leave the device, too.
        """
        scheduler, sent_back = self._scheduler, []
        by_turn = sorted(reach, key=lambda row: job.turn if (job := scheduler.rows[row]) else -1)
        for row in by_turn:
            if scheduler.rows[row] is not None:
                sent_back += scheduler.reserve(row, reach[row])
        if sent_back:
            self.counters.sent_back += len(sent_back)
            self.runner.retire(sent_back)
        self._show_pages()
        return {row: job for row in reach if (job := scheduler.rows[row]) is not None and row not in sent_back}

    def _show_pages(self) -> None:
        self.runner.set_pages({row: job.pages for row, job in self._scheduler.live()})

    def _chunks(self, start: int, length: int) -> Iterator[tuple[int, int]]:
        """(start, padded width) of every chunk: the widest while it is full, then the narrowest that holds the rest."""
        widths = sorted(self.options.prefill_chunks)
        while start < length:
            width = next((width for width in widths if width >= length - start), widths[-1])
            yield start, width
            start += width

    def _land(self, flight: _Flight) -> list[Event]:
        """Read the results of a program: record them, end what is over."""
        host = jax.device_get(flight.output)
        if isinstance(host, LoopOutput):
            counts, proposed, accepted = host.num_rounds, host.proposed, host.accepted
        else:
            counts = host.is_round.astype(np.int32)
            proposed, accepted = host.proposed[:, None], host.accepted[:, None]
        events = []
        for row, job in flight.jobs.items():
            if job.completion.finish_reason is None:
                rounds = zip(proposed[row, : counts[row]].tolist(), accepted[row, : counts[row]].tolist(), strict=True)
                tokens = host.tokens[row][host.tokens[row] != NO_TOKEN].tolist()
                self._record(job, tokens, list(rounds), int(host.non_finite[row]))
                job.next_length = int(host.next_length[row])
                event = Event(id=job.id, tokens=tuple(tokens), completion=job.completion)
                if event.tokens or event.is_end:
                    events.append(event)
        for row, job in list(self._scheduler.live()):
            if job.completion.finish_reason is not None:
                self._scheduler.release(row)
        return events

    def _record(self, job: Job, tokens: list[int], rounds: list[tuple[int, int]], non_finite: int) -> None:
        completion, now = job.completion, time.perf_counter()
        if tokens and not job.first_token_at:
            job.first_token_at = now
            completion.prefill_seconds = now - job.admitted_at
        job.num_said += len(tokens)
        completion.output_ids += tokens
        completion.rounds += rounds
        completion.non_finite_rounds += non_finite
        completion.decode_seconds = now - job.first_token_at if job.first_token_at else 0.0
        if completion.output_ids and completion.output_ids[-1] in completion.request.stop_ids:
            completion.finish_reason = "stop"
        elif job.remaining <= 0:
            completion.finish_reason = "length"

    def _end(self, job: Job) -> bool:
        job.completion.finish_reason = "cancelled"
        self._ended.append(Event(id=job.id, tokens=(), completion=job.completion))
        return True

    def _abandon(self) -> None:
        """Drop everything, on the device too."""
        self._flights.clear()
        self._scheduler.waiting.clear()
        live = [row for row, _ in self._scheduler.live()]
        for row in live:
            self._scheduler.release(row)
        if live:
            self.runner.retire(live)
        self._ended = []


def plan_of(target: Target, draft: Draft | None, options: EngineOptions) -> EnginePlan:
    """The plan for two modules, whose parameters may be shapes."""
    return EnginePlan.of(
        options,
        vocab_size=int(target.config.vocab_size),
        target_params=target.kv_params(options.page_size),
        draft=None if draft is None else draft.config,
        draft_params=None if draft is None else draft.kv_params(options.page_size),
    )
