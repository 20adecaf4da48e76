"""Which request has which row and which pages: host-side decisions, without a device.

Requests are admitted in the order in which they came. A row owns the pages of what it has stored and of the round that
comes next, and takes more when it needs them. When the pool is empty the row that was admitted last gives its pages
away and waits again at the head of the queue: its prompt, and what it has said so far, goes through the target once
more when it returns. The row that was admitted first is never sent away, so every request ends.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Iterator

from dspark_jax.pipelines.speculative.completion import Completion
from dspark_jax.pipelines.speculative.generation import Request
from dspark_jax.pipelines.speculative.page_pool import PagePool
from dspark_jax.pipelines.speculative.sizes import EnginePlan

RequestId = int


@dataclasses.dataclass(kw_only=True)
class Job:
    """A request on its way. `to_feed` is what the target has to see before the row can decode."""

    id: RequestId
    completion: Completion
    to_feed: tuple[int, ...] = ()
    num_fed: int = 0
    num_said: int = 0  # tokens since the row was admitted
    next_length: int = 0  # drafts that the next round verifies; as long as the host does not know, as many as can be
    pages: list[int] = dataclasses.field(default_factory=list)
    turn: int = -1  # order of admission
    admitted_at: float = 0.0
    first_token_at: float = 0.0

    @property
    def request(self) -> Request:
        """What was asked."""
        return self.completion.request

    @property
    def is_prefilling(self) -> bool:
        """Prompt tokens are left to feed."""
        return self.num_fed < len(self.to_feed)

    @property
    def committed(self) -> int:
        """P, as far as the host knows: the newest token is not through the target."""
        return self.num_fed + max(self.num_said - 1, 0)

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
        self._turns = 0

    def submit(self, job: Job) -> None:
        """Put a job at the end of the queue."""
        self.waiting.append(job)

    def live(self) -> Iterator[tuple[int, Job]]:
        """(row, job) of every used row."""
        return ((row, job) for row, job in enumerate(self.rows) if job is not None)

    def admit(self) -> list[tuple[int, Job]]:
        """Give free rows to waiting jobs while the pool has the pages of their prompts and of a round after them."""
        admitted = []
        for row, job in enumerate(self.rows):
            if job is not None or not self.waiting or not self._has_room(self.waiting[0]):
                continue
            new = self.waiting.popleft()
            new.to_feed, new.num_fed, new.num_said = _text(new), 0, 0
            new.completion.num_resumes += bool(new.completion.output_ids)
            new.next_length = self.plan.num_speculative_tokens
            new.turn, self._turns = self._turns, self._turns + 1
            new.admitted_at = new.admitted_at or time.perf_counter()
            self.rows[row] = new
            admitted.append((row, new))
        return admitted

    def reserve(self, row: int, positions: int) -> list[int]:
        """See that the row owns the pages of its first `positions`; other rows, or the row itself, may have to go.

        Returns the rows that were sent back to the queue.
        """
        job, sent_back = self.rows[row], []
        assert job is not None
        while (missing := self._missing(job, positions)) > self.pool.num_free:
            last = max((one for _, one in self.live()), key=lambda one: one.turn)
            sent_back.append(self.rows.index(last))
            self._send_back(last)
            if last is job:
                return sent_back
        job.pages += self.pool.take(max(missing, 0))
        return sent_back

    def extend(self, row: int, positions: int) -> None:
        """Take pages for up to `positions` positions of the row, as far as there are free ones."""
        job = self.rows[row]
        assert job is not None
        job.pages += self.pool.take(max(min(self._missing(job, positions), self.pool.num_free), 0))

    def release(self, row: int) -> None:
        """The row is done with: its pages are free."""
        job = self.rows[row]
        assert job is not None
        self.pool.release(job.pages)
        job.pages, self.rows[row] = [], None

    def whole_need(self, job: Job) -> int:
        """Positions that the job can come to use, a round beyond its last token included."""
        return len(job.request.prompt_ids) + job.completion.allowed_new_tokens + self.plan.tokens_per_round

    def _has_room(self, job: Job) -> bool:
        """Whether the pool can feed the job beside those that are being fed; an empty engine has room for any."""
        round_size = self.plan.tokens_per_round
        promised = sum(max(self._missing(one, len(one.to_feed) + round_size), 0) for _, one in self.live())
        wanted = self.plan.pages_of(len(_text(job)) + round_size)
        return promised + wanted <= self.pool.num_free or not any(self.rows)

    def _missing(self, job: Job, positions: int) -> int:
        return min(self.plan.pages_of(positions), self.plan.pages_per_row) - len(job.pages)

    def _send_back(self, job: Job) -> None:
        self.release(self.rows.index(job))
        self.waiting.appendleft(job)


def _text(job: Job) -> tuple[int, ...]:
    """The prompt and what was said so far."""
    return (*job.request.prompt_ids, *job.completion.output_ids)
