"""Assigns rows and pages to requests. Runs on the host and needs no device.

Requests are admitted in the order of their arrival. A row holds the pages of its stored tokens and of its next round,
and takes more pages as it grows. When the pool is empty, the row that was admitted last is preempted: it loses its
pages and waits at the head of the queue, and when it is admitted again, its prompt and its output so far go through the
target again. The row that was admitted first is never preempted, so every request ends.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Iterator

import numpy as np

from dspark_jax.pipelines.sampling.continuations import Continuations
from dspark_jax.pipelines.sampling.generation import Request
from dspark_jax.pipelines.sampling.text_watch import TextWatch
from dspark_jax.pipelines.speculative.completion import Completion
from dspark_jax.pipelines.speculative.page_pool import PagePool
from dspark_jax.pipelines.speculative.sizes import EnginePlan

RequestId = int


@dataclasses.dataclass(kw_only=True)
class Job:
    """A request while it waits or runs. `prefill_ids` must go through the target before the row can decode."""

    id: RequestId
    completion: Completion
    seed_words: np.ndarray  # of the request's random numbers, the same after a preemption
    watch: TextWatch | None = None  # has read all tokens of the output
    continuations: Continuations | None = None  # has read all tokens of the output
    prefill_ids: tuple[int, ...] = ()
    num_prefilled: int = 0
    num_emitted: int = 0  # tokens emitted since the last admission
    drafts: tuple[int, ...] = ()  # for the next round, where the policy has masks
    next_length: int = 0  # drafts that the next round verifies, k while the host does not know yet
    pages: list[int] = dataclasses.field(default_factory=list)
    admission_order: int = -1  # position in the order of admissions, -1 before the first
    admitted_at: float = 0.0  # `time.perf_counter` of the first admission
    first_token_at: float = 0.0  # 0 before the first token

    @property
    def request(self) -> Request:
        """The request itself."""
        return self.completion.request

    @property
    def is_watched(self) -> bool:
        """Whether the host can end the text: the device does not know where."""
        return self.watch is not None or self.continuations is not None

    @property
    def is_prefilling(self) -> bool:
        """Whether some of `prefill_ids` are still to be fed."""
        return self.num_prefilled < len(self.prefill_ids)

    @property
    def committed(self) -> int:
        """P, as far as the host knows. The newest emitted token is the anchor and not committed."""
        return self.num_prefilled + max(self.num_emitted - 1, 0)

    @property
    def remaining(self) -> int:
        """Tokens that the row may still emit."""
        return self.completion.allowed_new_tokens - len(self.completion.output_ids)


class Scheduler:
    """The queue, the rows and the page pool of one engine."""

    def __init__(self, plan: EnginePlan) -> None:
        self.plan, self.pool = plan, PagePool(plan.num_pages)
        self.waiting: collections.deque[Job] = collections.deque()
        self.rows: list[Job | None] = [None] * plan.options.batch_size
        self._num_admissions = 0

    def submit(self, job: Job) -> None:
        """Put a job at the end of the queue."""
        self.waiting.append(job)

    def live(self) -> Iterator[tuple[int, Job]]:
        """(row, job) of every row in use."""
        return ((row, job) for row, job in enumerate(self.rows) if job is not None)

    def admit(self) -> list[tuple[int, Job]]:
        """Give free rows to waiting jobs, while the pool has the pages for their prompts and one round each."""
        admitted = []
        for row, job in enumerate(self.rows):
            if job is not None or not self.waiting or not self._has_room(self.waiting[0]):
                continue
            new = self.waiting.popleft()
            new.prefill_ids, new.num_prefilled, new.num_emitted = _text(new), 0, 0
            new.completion.num_resumes += bool(new.completion.output_ids)
            new.drafts, new.next_length = (), self.plan.num_speculative_tokens
            new.admission_order, self._num_admissions = self._num_admissions, self._num_admissions + 1
            new.admitted_at = new.admitted_at or time.perf_counter()
            self.rows[row] = new
            admitted.append((row, new))
        return admitted

    def reserve(self, row: int, positions: int) -> list[int]:
        """Take the pages that the row lacks for its first `positions` positions. If the pool has too few, rows are
        preempted, which may include this one.

        Returns the preempted rows.
        """
        job, preempted = self.rows[row], []
        assert job is not None
        while (missing := self._missing(job, positions)) > self.pool.num_free:
            last = max((running for _, running in self.live()), key=lambda running: running.admission_order)
            preempted.append(self.rows.index(last))
            self._preempt(last)
            if last is job:
                return preempted
        job.pages += self.pool.take(max(missing, 0))
        return preempted

    def extend(self, row: int, positions: int) -> None:
        """Take pages for up to `positions` positions of the row, as many as are free. Preempts no row."""
        job = self.rows[row]
        assert job is not None
        job.pages += self.pool.take(max(min(self._missing(job, positions), self.pool.num_free), 0))

    def release(self, row: int) -> None:
        """Free the row and its pages."""
        job = self.rows[row]
        assert job is not None
        self.pool.release(job.pages)
        job.pages, self.rows[row] = [], None

    def max_positions(self, job: Job) -> int:
        """The most positions that the job can use: prompt, budget, and one round beyond the last token."""
        return len(job.request.prompt_ids) + job.completion.allowed_new_tokens + self.plan.tokens_per_round

    def _has_room(self, job: Job) -> bool:
        """Whether the pool has the pages for the job's text and for the prompts in use. True if no job runs."""
        round_size = self.plan.tokens_per_round
        promised = sum(max(self._missing(one, len(one.prefill_ids) + round_size), 0) for _, one in self.live())
        wanted = self.plan.pages_of(len(_text(job)) + round_size)
        return promised + wanted <= self.pool.num_free or not any(self.rows)

    def _missing(self, job: Job, positions: int) -> int:
        return min(self.plan.pages_of(positions), self.plan.pages_per_row) - len(job.pages)

    def _preempt(self, job: Job) -> None:
        self.release(self.rows.index(job))
        self.waiting.appendleft(job)


def _text(job: Job) -> tuple[int, ...]:
    """The prompt and the output so far."""
    return (*job.request.prompt_ids, *job.completion.output_ids)
