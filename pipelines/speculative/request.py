"""What an engine is sized for, what it is asked, and whether it can serve that: plain data, known before any weights
are.
"""

from __future__ import annotations

import dataclasses

from dspark_jax.speculators_common.errors import RequestError


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Sizes that are fixed when the engine is built. `max_seq_len` bounds prompt and output together."""

    num_speculative_tokens: int | None = None  # k; None = all that the draft's block gives
    max_seq_len: int = 2048
    batch_size: int = 1  # rows that decode together
    num_pages: int | None = None  # pool size; None = enough for batch_size rows of max_seq_len
    page_size: int = 64
    prefill_chunks: tuple[int, ...] = (64, 256)
    rounds_per_call: int = 32  # rounds of one device loop
    max_stop_ids: int = 8

    def pages_per_row(self, num_drafts: int) -> int:
        """Pages of a row: `max_seq_len` tokens and one round of `num_drafts` beyond them."""
        return -(-(self.max_seq_len + num_drafts + 1) // self.page_size)

    def pool_pages(self, num_drafts: int) -> int:
        """Pages of the whole pool."""
        return self.num_pages or self.batch_size * self.pages_per_row(num_drafts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and how far to go from it."""

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    stop_ids: tuple[int, ...] = ()
    confidence_threshold: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """What a request may ask of one engine. `longest`: tokens of the longest sequence, prompt and output together."""

    vocab_size: int
    longest: int
    max_stop_ids: int

    @classmethod
    def of(cls, options: EngineOptions, *, vocab_size: int, num_drafts: int) -> RequestLimits:
        """The limits of an engine with `options` and `num_drafts` drafts per round: the page pool has to hold a round
        in flight, too.
        """
        in_pool = options.pool_pages(num_drafts) * options.page_size - num_drafts - 1
        return cls(vocab_size=vocab_size, longest=min(options.max_seq_len, in_pool), max_stop_ids=options.max_stop_ids)

    def check(self, request: Request) -> None:
        """Raise a `RequestError` for a request that cannot be served."""
        outside = [token for token in request.prompt_ids if not 0 <= token < self.vocab_size]
        ids = f"ids 0..{self.vocab_size - 1}"
        faults = [
            (not request.prompt_ids, "prompt", "no tokens", "at least one token"),
            (bool(outside), "prompt", f"token id {outside[:1]}", ids),
            (
                len(request.prompt_ids) >= self.longest,
                "prompt",
                f"{len(request.prompt_ids)} tokens",
                f"at most {self.longest - 1} (max_seq_len, page pool)",
            ),
            (request.max_new_tokens < 1, "max_new_tokens", request.max_new_tokens, "1 or more"),
            (
                len(request.stop_ids) > self.max_stop_ids,
                "stop_ids",
                f"{len(request.stop_ids)} ids",
                f"at most {self.max_stop_ids}",
            ),
            (any(not 0 <= token < self.vocab_size for token in request.stop_ids), "stop_ids", request.stop_ids, ids),
            (not 0 <= request.confidence_threshold <= 1, "confidence_threshold", request.confidence_threshold, "0..1"),
        ]
        for is_fault, field, found, allowed in faults:
            if is_fault:
                raise RequestError(f"{field}: found {found}, allowed {allowed}")
