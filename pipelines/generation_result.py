"""The result of one prompt: text, ids, rounds and times."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dspark_jax.pipelines.checkpoints.loading import LoadedTarget
from dspark_jax.pipelines.compilation import CompileClock
from dspark_jax.pipelines.speculative.completion import Completion, FinishReason
from dspark_jax.pipelines.text.stream_decoder import StreamDecoder


class Round(NamedTuple):
    """One round. Plain decoding has rounds of (0, 0)."""

    proposed: int  # drafts that the target verified
    accepted: int  # drafts that it accepted


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """The result of one prompt. Times exclude compilation, except `compile_seconds`; rows in one batch share them."""

    text: str | None  # without special tokens; None for a model without tokenizer
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]  # the stop token included
    finish_reason: FinishReason
    allowed_new_tokens: int  # the request's budget, or the rest of the longest sequence if that is less
    tau: float | None  # mean acceptance length: committed tokens per round, bonus included; None without a round
    rounds: tuple[Round, ...]  # the first token belongs to no round: it comes from the prompt
    non_finite_rounds: int  # rounds after which the draft's states were not finite, so that it proposed nothing
    first_token_seconds: float  # from admission to the first token
    decode_seconds: float  # from the first token to the last
    compile_seconds: float

    @property
    def seconds(self) -> float:
        """From admission to the last token."""
        return self.first_token_seconds + self.decode_seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding speed: tokens after the first, per second; `None` for a single token."""
        return (
            (len(self.output_ids) - 1) / self.decode_seconds
            if len(self.output_ids) > 1 and self.decode_seconds > 0
            else None
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamPiece:
    """New output of one prompt."""

    index: int  # of the prompt
    text: str  # empty while a character is incomplete, and for models without tokenizer
    ids: tuple[int, ...]


OnPiece = Callable[[StreamPiece], None]


class Output:
    """The output of one prompt while it runs: decodes its text and records when its tokens arrived."""

    def __init__(self, index: int, target: LoadedTarget, on_piece: OnPiece | None) -> None:
        self._index, self._tokenizer, self._on_piece = index, target.tokenizer, on_piece
        self._decoder: StreamDecoder | None = (
            target.tokenizer.stream_decoder() if on_piece and target.tokenizer else None
        )
        self._first = self._last = 0.0

    def add(self, ids: Sequence[int]) -> None:
        """Record tokens that have just reached the host."""
        self._last = time.perf_counter()
        self._first = self._first or self._last
        if self._on_piece is not None and ids:
            self._on_piece(
                StreamPiece(index=self._index, text=self._decoder.push(ids) if self._decoder else "", ids=tuple(ids))
            )

    def result(self, completion: Completion, clock: CompileClock) -> GenerationResult:
        """The finished output. Compilation that happened during the request is subtracted from its times."""
        if self._on_piece is not None and self._decoder is not None and (rest := self._decoder.finish()):
            self._on_piece(StreamPiece(index=self._index, text=rest, ids=()))
        compiled_first = clock.seconds(self._first - completion.prefill_seconds, self._first)
        compiled_later = clock.seconds(self._first, self._last)
        assert completion.finish_reason is not None
        return GenerationResult(
            text=None if self._tokenizer is None else self._tokenizer.decode(completion.output_ids),
            prompt_ids=completion.request.prompt_ids,
            output_ids=tuple(completion.output_ids),
            finish_reason=completion.finish_reason,
            allowed_new_tokens=completion.allowed_new_tokens,
            tau=completion.tau,
            rounds=tuple(Round(*pair) for pair in completion.rounds),
            non_finite_rounds=completion.non_finite_rounds,
            first_token_seconds=max(completion.prefill_seconds - compiled_first, 0.0),
            decode_seconds=max(completion.decode_seconds - compiled_later, 0.0),
            compile_seconds=compiled_first + compiled_later,
        )
