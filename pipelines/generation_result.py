"""The result of one continuation: text, ids, rounds, log-probabilities and times; whole, and piece by piece."""

from __future__ import annotations

import dataclasses
import time
from typing import NamedTuple

from dspark_jax.pipelines.compilation import CompileClock
from dspark_jax.pipelines.sampling.generation import Request
from dspark_jax.pipelines.speculative.completion import Completion, FinishReason, TokenLogprobs, reaching
from dspark_jax.pipelines.speculative.engine import Event
from dspark_jax.pipelines.text.stop_strings import StoppedText
from dspark_jax.pipelines.text.tokenizer import Tokenizer


class Round(NamedTuple):
    """One round. Plain decoding has rounds of (0, 0)."""

    proposed: int  # drafts that the target verified
    accepted: int  # drafts that it accepted


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """One continuation. Times exclude compilation, except `compile_seconds`; rows in one batch share them."""

    text: str | None  # without special tokens and stop string; None for a model without tokenizer
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]  # with the stop token, or the token that completes the stop string
    sample: int  # number of this continuation among several of its prompt
    seed: int | None  # of its random numbers; None for greedy decoding
    logprobs: tuple[TokenLogprobs, ...] | None  # per output id; None where not asked for
    acceptance: str  # the rule by which drafts were accepted: "exact", or one that changes the text
    finish_reason: FinishReason
    allowed_new_tokens: int  # the request's budget, or the rest of the longest sequence if that is less
    tau: float | None  # mean acceptance length: committed tokens per round, bonus included; None without a round
    rounds: tuple[Round, ...]  # the first token belongs to no round: it comes from the prompt
    non_finite_rounds: int  # rounds after which the draft's states were not finite, so that it proposed nothing
    first_token_seconds: float  # from admission to the first token
    decode_seconds: float  # from the first token to the last
    compile_seconds: float

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt_ids)

    @property
    def completion_tokens(self) -> int:
        """Number of output tokens."""
        return len(self.output_ids)

    @property
    def drafted(self) -> int:
        """Drafts that the target verified."""
        return sum(one.proposed for one in self.rounds)

    @property
    def accepted(self) -> int:
        """Drafts that the target accepted."""
        return sum(one.accepted for one in self.rounds)

    @property
    def drafted_per_position(self) -> tuple[int, ...]:
        """Rounds that verified a first draft, a second one, and so on."""
        return reaching([one.proposed for one in self.rounds], self._most_drafts)

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        """Rounds that accepted a first draft, a second one, and so on; as long as `drafted_per_position`."""
        return reaching([one.accepted for one in self.rounds], self._most_drafts)

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

    @property
    def _most_drafts(self) -> int:
        return max((one.proposed for one in self.rounds), default=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamPiece:
    """New output of one continuation."""

    index: int  # of the result among all results: with n continuations of each prompt, prompt * n + sample
    text: str  # empty while a character or a stop string may be incomplete, and for models without tokenizer
    ids: tuple[int, ...]
    result: GenerationResult | None = None  # of the whole output, in its last piece

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the output ended; `None` except in its last piece."""
        return None if self.result is None else self.result.finish_reason


class Output:
    """One continuation while it runs: decodes its text and records when its tokens arrived."""

    def __init__(
        self, index: int, request: Request, tokenizer: Tokenizer | None, *, acceptance: str, stream: bool
    ) -> None:
        """`acceptance` names the rule. Without `stream` pieces have no text; the text is decoded once, at the end."""
        self._index, self._request, self._tokenizer, self._acceptance = index, request, tokenizer, acceptance
        self._text = _text_of(request, tokenizer) if stream and tokenizer is not None else None
        self._first = self._last = 0.0

    def piece(self, event: Event, clock: CompileClock) -> StreamPiece:
        """The piece of an event that has just reached the host. Compilation is subtracted from the result's times."""
        text = ""
        if event.tokens:
            self._last = time.perf_counter()
            self._first = self._first or self._last
        if self._text is not None:
            self._text.push(event.tokens)
            text = self._text.take() + (self._text.finish() if event.is_end else "")
        result = self._result(event.completion, clock) if event.is_end else None
        return StreamPiece(index=self._index, text=text, ids=event.tokens, result=result)

    def _result(self, completion: Completion, clock: CompileClock) -> GenerationResult:
        compiled_first = clock.seconds(self._first - completion.prefill_seconds, self._first)
        compiled_later = clock.seconds(self._first, self._last)
        generation = self._request.generation
        assert completion.finish_reason is not None
        return GenerationResult(
            text=None if self._tokenizer is None else self._whole_text(completion, self._tokenizer),
            prompt_ids=self._request.prompt_ids,
            output_ids=tuple(completion.output_ids),
            sample=self._request.sample,
            seed=generation.seed if generation.samples else None,
            logprobs=None if generation.num_logprobs is None else tuple(completion.logprobs),
            acceptance=self._acceptance,
            finish_reason=completion.finish_reason,
            allowed_new_tokens=completion.allowed_new_tokens,
            tau=completion.tau,
            rounds=tuple(Round(*pair) for pair in completion.rounds),
            non_finite_rounds=completion.non_finite_rounds,
            first_token_seconds=max(completion.prefill_seconds - compiled_first, 0.0),
            decode_seconds=max(completion.decode_seconds - compiled_later, 0.0),
            compile_seconds=compiled_first + compiled_later,
        )

    def _whole_text(self, completion: Completion, tokenizer: Tokenizer) -> str:
        if not self._request.generation.stop_strings:
            return tokenizer.decode(completion.output_ids)
        text = _text_of(self._request, tokenizer)
        text.push(completion.output_ids)
        return text.finish()


def _text_of(request: Request, tokenizer: Tokenizer) -> StoppedText:
    return StoppedText(tokenizer, request.generation.stop_strings, request.generation.min_new_tokens)
