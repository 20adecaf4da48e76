"""The engine: takes requests, runs them in batches, and reports their tokens as events.

A `Scheduler` assigns rows and pages, a `Runner` holds the device state and starts programs. A server calls `submit`,
`cancel` and `step`; `run` and `generate` are loops over them. The host sees committed tokens only.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Generator, Iterator, Mapping, Sequence

import numpy as np

from dspark_jax.architectures.protocols import Draft, Target
from dspark_jax.pipelines.sampling.continuations import Continuations
from dspark_jax.pipelines.sampling.generation import Generation, Request
from dspark_jax.pipelines.sampling.policy import GREEDY, Policy
from dspark_jax.pipelines.sampling.token_masks import TokenMasks, token_masks
from dspark_jax.pipelines.speculative.completion import Completion
from dspark_jax.pipelines.speculative.loop import LoopOutput
from dspark_jax.pipelines.speculative.probe import ProgramProbe, RoundTimes
from dspark_jax.pipelines.speculative.results import PendingProgram, read_results, record
from dspark_jax.pipelines.speculative.runner import Runner
from dspark_jax.pipelines.speculative.scheduler import Job, RequestId, Scheduler
from dspark_jax.pipelines.speculative.sizes import EngineOptions, EnginePlan, plan_of
from dspark_jax.pipelines.speculative.state import RoundOutput
from dspark_jax.speculators_common.errors import RequestError

__all__ = ["Completion", "Engine", "EngineOptions", "Event", "Request"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """New tokens of one request. If `is_end` is true, the request has ended and this is its last event."""

    id: RequestId
    tokens: tuple[int, ...]
    completion: Completion

    @property
    def is_end(self) -> bool:
        """Whether this is the last event of the request."""
        return self.completion.finish_reason is not None


@dataclasses.dataclass(kw_only=True)
class Counters:
    """What an engine has started since it was made."""

    prompt_chunks: int = 0  # prefill programs, of one row each
    mixed_steps: int = 0  # programs that feed prompt tokens of some rows and run a round of the others
    round_calls: int = 0  # programs of one round or of a device loop
    packed_calls: int = 0  # those of `round_calls` whose flat batch is shorter than all drafts need
    preempted: int = 0  # rows that lost their pages and went back to the queue


class Engine:
    """Runs requests on a (target, draft) pair. Without a draft the same programs decode plainly."""

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
        self._pending: collections.deque[PendingProgram] = collections.deque()
        self._ended: list[Event] = []  # last events of cancelled requests, not returned by `step` yet
        self._next_id = 0

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, or `step` has events to return."""
        return bool(self._ended or self._pending or self._scheduler.waiting or any(self._scheduler.rows))

    @property
    def num_running(self) -> int:
        """Number of rows in use."""
        return sum(1 for _ in self._scheduler.live())

    @property
    def num_free_pages(self) -> int:
        """Number of pages that no request holds."""
        return self._scheduler.pool.num_free

    def submit(self, request: Request) -> RequestId:
        """Queue a request; returns its id. Raises `RequestError` for a request that cannot be served."""
        self.plan.check(request)
        identifier, self._next_id = self._next_id, self._next_id + 1
        completion = Completion(request=request, allowed_new_tokens=self.plan.allowed_new_tokens(request))
        generation, vocab_size = request.generation, self.plan.vocab_size
        job = Job(id=identifier, completion=completion, seed_words=request.seed_words())
        if request.new_watch is not None:
            job.watch = request.new_watch()
        if generation.grammar is not None and request.new_matcher is not None:
            job.continuations = Continuations(request.new_matcher(), generation, vocab_size)
        self._scheduler.submit(job)
        return identifier

    def cancel(self, identifier: RequestId) -> bool:
        """End a request; its last event follows. Returns false if the id is unknown or the request has ended."""
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
        """Start programs or read the results of one; returns the events. With `stream` a program decodes one round,
        otherwise many.

        While a row has a text watch or a grammar, every program decodes one round: the device does not know where the
        host ends a text, so further rounds could be for nothing, nor what a grammar allows in the next round. Programs
        are started only after the results of all earlier ones were read: the scheduler must not decide on an outdated
        state.
        """
        if self._ended:
            events, self._ended = self._ended, []
            return events
        if not self._pending:
            self._start(stream)
        return self._read_results(self._pending.popleft()) if self._pending else []

    def run(self, requests: Sequence[Request], *, stream: bool = False) -> Generator[tuple[int, Event], None, None]:
        """Yield `(request index, event)` as tokens reach the host: with `stream` after every round, otherwise after
        every device loop.

        Closing the generator cancels the requests that have not ended, and frees their rows. A request that would
        exceed `max_seq_len` ends there with reason `length`. Raises `RequestError` for a request that cannot be served,
        and if another run is in progress.
        """
        if self.has_work:
            raise RequestError(
                field="engine", found="a run in progress", allowed="one run at a time: finish or close it first"
            )
        for request in requests:
            self.plan.check(request)
        index_of = {self.submit(request): index for index, request in enumerate(requests)}
        try:
            while self.has_work:
                for event in self.step(stream=stream):
                    yield index_of[event.id], event
        finally:
            self._abandon()

    def generate(self, requests: Sequence[Request], *, stream: bool = False) -> list[Completion]:
        """Run all requests; returns their completions in the order of the requests. Arguments as in `run`."""
        done = {index: event.completion for index, event in self.run(requests, stream=stream) if event.is_end}
        return [done[index] for index in range(len(requests))]

    def warmup(self, *, stream: bool | None = None, policies: Sequence[Policy] = (GREEDY,)) -> int:
        """Compile every program that a request can need, by running each on inert rows; returns their number.

        `stream` restricts it to one driver: true to one round per call, false to the device loop. `policies` are what
        the requests will use, and what they will use together. No request may wait or run.
        """
        assert not self.has_work
        runner, count = self.runner, 0
        for runner.policy in policies:
            count += sum(self._warm_programs(num_pages, stream) for num_pages in self.plan.page_buckets)
        request = Request(prompt_ids=(0,), generation=Generation(max_new_tokens=1))
        completion = Completion(request=request, allowed_new_tokens=0)
        runner.admit(0, Job(id=-1, completion=completion, seed_words=request.seed_words()))
        runner.set_pages({})
        runner.retire([0])
        runner.wait()
        return count

    def _warm_programs(self, num_pages: int, stream: bool | None) -> int:
        runner, count = self.runner, 0
        for width in self.options.prefill_chunks:
            runner.prefill(0, (), width=width, is_last=False, num_pages=num_pages)
            count += 1
        if self.options.batch_size > 1:
            runner.mixed({}, last=(), width=self._mixed_width, num_pages=num_pages)
            count += 1
        for num_tokens in self.plan.token_buckets:
            if stream in (None, True):
                runner.round(num_pages=num_pages, num_tokens=num_tokens)
                count += 1
            if stream in (None, False) and not runner.policy.masks:
                runner.loop(num_pages=num_pages, num_tokens=num_tokens, until_any_finishes=False)
                count += 1
        return count

    def probe(
        self,
        num_rows: int = 1,
        *,
        num_verified: int | None = None,
        num_tokens: int | None = None,
        generation: Generation | None = None,
    ) -> ProgramProbe:
        """A probe that times this engine's device loop on `num_rows` rows of its own.

        `num_verified` is the number of drafts that each row verifies in a round, k by default. `generation` states the
        controls of the rows, by default those of greedy decoding.
        """
        return ProgramProbe(
            self.runner.programs,
            self.plan,
            num_rows=num_rows,
            num_verified=self.plan.num_speculative_tokens if num_verified is None else num_verified,
            num_tokens=num_tokens,
            generation=generation or Generation(),
        )

    def timed_stream(self, request: Request) -> tuple[Completion, list[RoundTimes]]:
        """Run one request with one call per round, waiting for each round inside its call; also returns the times."""
        with self.runner.timing_rounds() as times:
            completion = self.generate([request], stream=True)[0]
        return completion, times

    @property
    def _mixed_width(self) -> int:
        return min(self.options.prefill_chunks)

    def _start(self, stream: bool) -> None:
        """Admit waiting requests, then start prefill programs, a mixed step or rounds; all are added to `_pending`."""
        scheduler = self._scheduler
        for row, job in scheduler.admit():
            self.runner.admit(row, job)
        self.runner.policy = Policy.joint(job.request.generation for _, job in scheduler.live())
        if any(job.is_prefilling for _, job in scheduler.live()):
            if any(not job.is_prefilling for _, job in scheduler.live()):
                self._start_mixed()
                return
            self._start_prefill()
            if self._pending and self.runner.policy.masks:
                return  # the masks of a round depend on the tokens before it
        if any(scheduler.rows):
            self._start_rounds(stream)

    def _start_prefill(self) -> None:
        """Feed whole prompts, one row after the other. Only used while no row decodes, so no row has to wait."""
        for row, job in sorted(self._scheduler.live(), key=lambda item: item[1].admission_order):
            for start, width in self._chunks(job.num_prefilled, len(job.prefill_ids)):
                end = min(start + width, len(job.prefill_ids))
                if self._reserve({row: end}):
                    is_last = end == len(job.prefill_ids)
                    ids = job.prefill_ids[start:end]
                    num_pages = self.plan.page_bucket(start + width)
                    masks = self._masks({0: job}, 1)
                    output = self.runner.prefill(
                        row, ids, width=width, is_last=is_last, num_pages=num_pages, masks=masks
                    )
                    job.num_prefilled = end
                    self.counters.prompt_chunks += 1
                    if is_last:
                        self._pending.append(PendingProgram(output=output, jobs={0: job}))

    def _start_mixed(self) -> None:
        """One program: a chunk of prompt tokens, oldest requests first, and a round of the rows that decode."""
        width = self._mixed_width
        positions = {row: self._round_end(job) for row, job in self._scheduler.live() if not job.is_prefilling}
        lengths: dict[int, int] = {}
        for row, job in sorted(self._scheduler.live(), key=lambda item: item[1].admission_order):
            if job.is_prefilling:
                lengths[row] = min(len(job.prefill_ids) - job.num_prefilled, width - sum(lengths.values()))
                positions[row] = job.num_prefilled + lengths[row]
        running = self._reserve(positions)
        parts, last = {}, []
        for row, job in running.items():
            if row in lengths:
                parts[row] = job.prefill_ids[job.num_prefilled : job.num_prefilled + lengths[row]]
                job.num_prefilled += lengths[row]
                if not job.is_prefilling:
                    last.append(row)
        if running:
            num_pages = self.plan.page_bucket(max(positions[row] for row in running))
            self.counters.mixed_steps += 1
            masks = self._masks(running, self.options.batch_size)
            output = self.runner.mixed(parts, last=last, width=width, num_pages=num_pages, masks=masks)
            self._pending.append(PendingProgram(output=output, jobs=running))

    def _start_rounds(self, stream: bool) -> None:
        scheduler = self._scheduler
        stream = stream or any(job.is_watched for _, job in scheduler.live())
        rounds = 1 if stream else self.options.rounds_per_call
        running = self._reserve({row: self._round_end(job) for row, job in scheduler.live() if not job.is_prefilling})
        for row, job in running.items():
            wanted = self._round_end(job) + (rounds - 1) * self.plan.tokens_per_round
            scheduler.extend(row, min(wanted, scheduler.max_positions(job)))
        if not running:
            return
        self._send_page_table()
        masks = self._masks(running, self.options.batch_size)
        num_tokens = self.plan.token_bucket(sum(1 + job.next_length for job in running.values()))
        num_pages = self.plan.page_bucket(max(map(self._round_end, running.values())))
        self.counters.round_calls += 1
        self.counters.packed_calls += num_tokens < self.plan.token_buckets[-1]
        if stream:
            output: RoundOutput | LoopOutput = self.runner.round(
                num_pages=num_pages, num_tokens=num_tokens, masks=masks
            )
        else:
            output = self.runner.loop(
                num_pages=num_pages, num_tokens=num_tokens, until_any_finishes=bool(scheduler.waiting)
            )
        self._pending.append(PendingProgram(output=output, jobs=running))

    def _masks(self, jobs: Mapping[int, Job], num_rows: int) -> TokenMasks | None:
        """What the grammars of these jobs (row -> job) allow in the program that is started next; their proposals are
        cut where they leave the grammar.

        The first draft outside it stays in a sampled proposal: it is rejected, and the token in its place must come
        from the residual. Whether a slot is verified would otherwise depend on its own draft.
        """
        if not self.runner.policy.masks:
            return None
        found: dict[int, tuple[np.ndarray, int]] = {}
        for row, job in jobs.items():
            if job.continuations is not None:
                drafts = job.drafts[: job.next_length]
                masks = job.continuations.masks(drafts)
                is_sampled = self.options.proposal == "sampled" and job.request.generation.samples
                job.next_length = min(len(masks) - 1 + is_sampled, len(drafts))
                found[row] = masks, job.next_length
        return token_masks(found, num_rows=num_rows, width=self.plan.tokens_per_round, vocab_size=self.plan.vocab_size)

    def _round_end(self, job: Job) -> int:
        """The number of positions that are in use after the job's next round: P plus the anchor and its drafts."""
        return job.committed + self.plan.tokens_per_round

    def _reserve(self, positions: Mapping[int, int]) -> dict[int, Job]:
        """Take pages for the first `positions[row]` positions of each row; returns the jobs of the rows that still run.

        Rows that were admitted first get their pages first. Preempted rows become inert on the device.
        """
        scheduler, preempted = self._scheduler, []
        in_order = sorted(positions, key=lambda row: job.admission_order if (job := scheduler.rows[row]) else -1)
        for row in in_order:
            if scheduler.rows[row] is not None:
                preempted += scheduler.reserve(row, positions[row])
        if preempted:
            self.counters.preempted += len(preempted)
            self.runner.retire(preempted)
        self._send_page_table()
        return {row: job for row in positions if (job := scheduler.rows[row]) is not None and row not in preempted}

    def _send_page_table(self) -> None:
        self.runner.set_pages({row: job.pages for row, job in self._scheduler.live()})

    def _chunks(self, start: int, length: int) -> Iterator[tuple[int, int]]:
        """(start, padded width) of every chunk: full ones of the largest width, then the smallest for the rest."""
        widths = sorted(self.options.prefill_chunks)
        while start < length:
            width = next((width for width in widths if width >= length - start), widths[-1])
            yield start, width
            start += width

    def _read_results(self, pending: PendingProgram) -> list[Event]:
        """Wait for the results of a program, record them, and free the rows of requests that ended."""
        events = []
        for found in read_results(pending):
            results = record(found)
            event = Event(id=results.job.id, tokens=tuple(results.tokens), completion=results.job.completion)
            if event.tokens or event.is_end:
                events.append(event)
        ended = [(row, job) for row, job in self._scheduler.live() if job.completion.finish_reason is not None]
        for row, _ in ended:
            self._scheduler.release(row)
        if watched := [row for row, job in ended if job.is_watched]:
            self.runner.retire(watched)  # the device may take these rows for live
        return events

    def _end(self, job: Job) -> bool:
        job.completion.finish_reason = "cancelled"
        self._ended.append(Event(id=job.id, tokens=(), completion=job.completion))
        return True

    def _abandon(self) -> None:
        """Drop all requests, on the host and on the device."""
        self._pending.clear()
        self._scheduler.waiting.clear()
        live = [row for row, _ in self._scheduler.live()]
        for row in live:
            self._scheduler.release(row)
        if live:
            self.runner.retire(live)
        self._ended = []
