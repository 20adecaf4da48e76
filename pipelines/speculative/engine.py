"""Requests in, tokens out: rows, pages and buckets around the compiled programs. The host sees committed
tokens only.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.architectures.nn.attention.kv_cache import KVPages
from dspark_jax.architectures.protocols import Draft, Target
from dspark_jax.pipelines.speculative.page_pool import PagePool
from dspark_jax.pipelines.speculative.programs import Programs
from dspark_jax.pipelines.speculative.request import EngineOptions, Request, RequestLimits
from dspark_jax.pipelines.speculative.state import NO_TOKEN, RoundOutput, RoundState, empty_state
from dspark_jax.speculators_common.errors import RequestError

__all__ = ["Completion", "Engine", "EngineOptions", "OnTokens", "Request"]

_SMALLEST_BUCKET = 256  # positions: attention reads whole buckets, compiling one takes seconds


@dataclasses.dataclass(kw_only=True)
class Completion:
    """What became of a request. `rounds` holds (proposed, accepted) of every verification; the first token belongs to
    none.
    """

    request: Request
    output_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    rounds: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    non_finite_rounds: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0  # wall time between the first and the last token, shared with the rows beside it

    @property
    def committed(self) -> int:
        """Tokens that the rounds committed: accepted drafts and the target's own, what the budget cut off included.

        A round that ends in an accepted stop token has no token of the target's own.
        """
        total = sum(accepted + 1 for _, accepted in self.rounds)
        ends_in_draft = self.finish_reason == "stop" and len(self.output_ids) - 1 < total
        return total - ends_in_draft

    @property
    def tau(self) -> float | None:
        """Mean acceptance length, `committed` per round; `None` without a round."""
        return self.committed / len(self.rounds) if self.rounds else None


OnTokens = Callable[[int, Sequence[int]], None]


@dataclasses.dataclass(kw_only=True)
class _Row:
    index: int  # of the request
    completion: Completion
    pages: list[int]
    started: float = 0.0

    @property
    def committed(self) -> int:
        return len(self.completion.request.prompt_ids) + len(self.completion.output_ids) - 1


class Engine:
    """Runs requests on a (target, draft) pair; without a draft it decodes plainly, by the same programs."""

    def __init__(self, target: Target, draft: Draft | None, options: EngineOptions | None = None) -> None:
        self.options = options = options or EngineOptions()
        self.num_speculative_tokens = _checked_draft_count(draft, options.num_speculative_tokens)
        self._headroom = self.num_speculative_tokens + 1
        self._pages_per_row = options.pages_per_row(self.num_speculative_tokens)
        self._pool = PagePool(options.pool_pages(self.num_speculative_tokens))
        self.limits = RequestLimits.of(
            options, vocab_size=int(target.config.vocab_size), num_drafts=self.num_speculative_tokens
        )
        self.programs = Programs(
            target,
            draft,
            num_speculative_tokens=self.num_speculative_tokens,
            page_size=options.page_size,
            max_rounds=options.rounds_per_call,
        )
        target_params = target.kv_params(options.page_size)
        draft_params = None if draft is None else draft.kv_params(options.page_size)
        self.kv_bytes = self._pool.num_pages * (
            target_params.bytes_per_page() + (draft_params.bytes_per_page() if draft_params else 0)
        )
        self._kv_params = (target_params, draft_params)
        self._state: RoundState | None = self._empty_state()
        self._rows: list[_Row | None] = [None] * options.batch_size

    @property
    def page_buckets(self) -> tuple[int, ...]:
        """Page counts that programs are compiled for: doubling, up to a whole row."""
        smallest = max(1, -(-_SMALLEST_BUCKET // self.options.page_size))
        sizes = [min(smallest, self._pages_per_row)]
        while sizes[-1] < self._pages_per_row:
            sizes.append(min(2 * sizes[-1], self._pages_per_row))
        return tuple(sizes)

    def warmup(self, *, stream: bool | None = None) -> int:
        """Compile every program that a request can need, by running each on inert rows; returns how many. `stream`
        restricts the decode driver.
        """
        assert all(row is None for row in self._rows)
        count = 0
        for num_pages in self.page_buckets:
            for width in self.options.prefill_chunks:
                self._prefill_call(0, np.zeros((width,), np.int32), 0, False, num_pages)
                count += 1
            if stream in (None, True):
                self._state, _ = self.programs.round(self._donated_state(), num_pages=num_pages)
                count += 1
            if stream in (None, False):
                self._state, _ = self.programs.loop(
                    self._donated_state(), num_pages=num_pages, until_any_finishes=False
                )
                count += 1
        self._state = jax.block_until_ready(self._admitted(0, [], 0, Request(prompt_ids=(0,), max_new_tokens=0)))
        self._state = dataclasses.replace(self._donated_state(), finished=jnp.ones((self.options.batch_size,), bool))
        return count

    def generate(
        self, requests: Sequence[Request], *, stream: bool = False, on_tokens: OnTokens | None = None
    ) -> list[Completion]:
        """Run all requests; completions come in request order. See `run` for `stream` and `on_tokens`."""
        done: dict[int, Completion] = dict(self.run(requests, stream=stream, on_tokens=on_tokens))
        return [done[index] for index in range(len(requests))]

    def run(
        self, requests: Sequence[Request], *, stream: bool = False, on_tokens: OnTokens | None = None
    ) -> Iterator[tuple[int, Completion]]:
        """Yield `(request index, completion)` as requests finish. With `stream` the host sees every round, otherwise
        every device loop.

        `on_tokens(index, ids)` gets the tokens of a request as they reach the host. A request that would pass
        `max_seq_len` ends there with reason `length`.
        """
        if any(self._rows):
            raise RequestError("engine: found a run in progress, allowed one at a time: finish or close it first")
        for request in requests:
            self.limits.check(request)
        waiting = collections.deque(enumerate(requests))
        tell = on_tokens or (lambda index, ids: None)
        try:
            while waiting or any(self._rows):
                self._admit_waiting(waiting, tell)
                yield from self._finished()
                if any(self._rows):
                    self._decode(stream, bool(waiting), tell)
                    yield from self._finished()
        finally:
            self._drop_all()

    def _admit_waiting(self, waiting: collections.deque[tuple[int, Request]], tell: OnTokens) -> None:
        for slot, row in enumerate(self._rows):
            if row is not None or not waiting:
                continue
            index, request = waiting[0]
            pages = self._pool.take(self._pages_needed(request))
            if not pages:
                return  # rows that finish will give theirs back
            waiting.popleft()
            self._rows[slot] = row = _Row(index=index, completion=Completion(request=request), pages=pages)
            self._prefill(slot, row, tell)

    def _prefill(self, slot: int, row: _Row, tell: OnTokens) -> None:
        started = time.perf_counter()
        request = row.completion.request
        self._state = self._admitted(slot, row.pages, self._budget(request), request)
        prompt = np.asarray(request.prompt_ids, np.int32)
        output = None
        for start, width in self._chunks(len(prompt)):
            part = prompt[start : start + width]
            is_last = start + len(part) == len(prompt)
            num_pages = self.page_bucket(start + width)
            output = self._prefill_call(slot, np.pad(part, (0, width - len(part))), len(part), is_last, num_pages)
        assert output is not None
        host = jax.device_get(output)
        self._record(row, host.tokens[0], (), int(host.non_finite[0]), tell)
        row.started = time.perf_counter()
        row.completion.prefill_seconds = row.started - started

    def _decode(self, stream: bool, until_any_finishes: bool, tell: OnTokens) -> None:
        deepest = max(row.committed for row in self._rows if row)
        num_pages = self.page_bucket(deepest + self._headroom)
        if stream:
            self._state, output = self.programs.round(self._donated_state(), num_pages=num_pages)
            host = jax.device_get(output)
            counts = host.is_round.astype(np.int32)
            proposed, accepted = host.proposed[:, None], host.accepted[:, None]
        else:
            self._state, loop_output = self.programs.loop(
                self._donated_state(), num_pages=num_pages, until_any_finishes=until_any_finishes
            )
            host = jax.device_get(loop_output)
            counts, proposed, accepted = host.num_rounds, host.proposed, host.accepted
        for slot, row in enumerate(self._rows):
            if row is not None:
                rounds = list(
                    zip(proposed[slot, : counts[slot]].tolist(), accepted[slot, : counts[slot]].tolist(), strict=True)
                )
                self._record(row, host.tokens[slot], rounds, int(host.non_finite[slot]), tell)

    def _record(
        self, row: _Row, tokens: np.ndarray, rounds: Sequence[tuple[int, int]], non_finite: int, tell: OnTokens
    ) -> None:
        completion = row.completion
        new = tokens[tokens != NO_TOKEN].tolist()
        completion.output_ids += new
        completion.rounds += rounds
        completion.non_finite_rounds += non_finite
        if completion.output_ids and completion.output_ids[-1] in completion.request.stop_ids:
            completion.finish_reason = "stop"
        elif len(completion.output_ids) >= self._budget(completion.request):
            completion.finish_reason = "length"
        completion.decode_seconds = time.perf_counter() - row.started if row.started else 0.0
        tell(row.index, new)

    def _finished(self) -> Iterator[tuple[int, Completion]]:
        for slot, row in enumerate(self._rows):
            if row is not None and row.completion.finish_reason is not None:
                self._pool.give_back(row.pages)
                self._rows[slot] = None
                yield row.index, row.completion

    def _drop_all(self) -> None:
        """After an abandoned run: free the rows that were still live, on the device too."""
        live = [row for row in self._rows if row is not None]
        for row in live:
            self._pool.give_back(row.pages)
        self._rows = [None] * len(self._rows)
        if live and self._state is not None:
            self._state = dataclasses.replace(self._state, finished=jnp.ones_like(self._state.finished))

    def _budget(self, request: Request) -> int:
        return min(request.max_new_tokens, self.limits.longest - len(request.prompt_ids))

    def _pages_needed(self, request: Request) -> int:
        positions = len(request.prompt_ids) + self._budget(request) + self._headroom
        return min(-(-positions // self.options.page_size), self._pool.num_pages)

    def page_bucket(self, positions: int) -> int:
        """Pages that a program reads so that `positions` of every row are in reach."""
        pages = -(-positions // self.options.page_size)
        return next((bucket for bucket in self.page_buckets if bucket >= pages), self._pages_per_row)

    def _chunks(self, length: int) -> Iterator[tuple[int, int]]:
        """(start, padded width) of every chunk: the widest while it is full, then the narrowest that holds the rest."""
        widths = sorted(self.options.prefill_chunks)
        start = 0
        while start < length:
            width = next((width for width in widths if width >= length - start), widths[-1])
            yield start, width
            start += width

    def _admitted(self, slot: int, pages: Sequence[int], budget: int, request: Request) -> RoundState:
        table = np.full((self._pages_per_row,), self._pool.num_pages, np.int32)
        table[: len(pages)] = pages
        stops = np.full((self.options.max_stop_ids,), NO_TOKEN, np.int32)
        stops[: len(request.stop_ids)] = request.stop_ids
        return self.programs.admit(
            self._donated_state(),
            slot,
            pages=jnp.asarray(table),
            budget=budget,
            stop_ids=jnp.asarray(stops),
            confidence_threshold=request.confidence_threshold,
        )

    def _prefill_call(self, slot: int, tokens: np.ndarray, length: int, is_last: bool, num_pages: int) -> RoundOutput:
        self._state, output = self.programs.prefill(
            self._donated_state(), slot, jnp.asarray(tokens), length, is_last, num_pages=num_pages
        )
        return output

    def _empty_state(self) -> RoundState:
        target, draft = self._kv_params
        return empty_state(
            KVPages.zeros(target, self._pool.num_pages),
            None if draft is None else KVPages.zeros(draft, self._pool.num_pages),
            num_rows=self.options.batch_size,
            pages_per_row=self._pages_per_row,
            num_drafts=self.num_speculative_tokens,
            num_stop_ids=self.options.max_stop_ids,
        )

    def _donated_state(self) -> RoundState:
        """The state, to be donated. A call that failed took it along: then the caches start anew, as all rows were
        dropped with it.
        """
        if self._state is None:
            self._state = self._empty_state()
        state, self._state = self._state, None
        return state


def _checked_draft_count(draft: Draft | None, asked: int | None) -> int:
    if draft is None:
        return 0
    available = draft.config.num_drafts
    if asked is None:
        return available
    if not 1 <= asked <= available:
        raise RequestError(
            f"num_speculative_tokens: found {asked}, allowed 1..{available} (block of {draft.config.block_size})"
        )
    return asked
