"""The Python interface in three lines: load a pair, generate, read.

pipeline = dspark_jax.load("smollm2", "models/smollm2-135m-dspark")
[result] = pipeline.generate("What is the capital of France?", max_new_tokens=40)
print(result.text, result.tau)
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dspark_jax.pipelines.checkpoint import open_checkpoint, open_target
from dspark_jax.pipelines.compilation import CompileClock
from dspark_jax.pipelines.load_choices import KVPlan, device_memory, in_bytes, load_choices
from dspark_jax.pipelines.loading import LoadedDraft, LoadedTarget, check_against, load_draft, load_target, parse_checkpoint
from dspark_jax.pipelines.prompts import Prompt, as_prompts, encode_prompt
from dspark_jax.pipelines.speculative.engine import Completion, Engine, EngineOptions, Request
from dspark_jax.pipelines.stream_decoder import StreamDecoder
from dspark_jax.speculators_common.draft_config import Choice, DraftOverrides
from dspark_jax.speculators_common.errors import RequestError

DEFAULT_MAX_SEQ_LEN = 2048
DEFAULT_MAX_NEW_TOKENS = 256
_DTYPES = ("bfloat16", "float32")  # a draft's states overflow float16


class Round(NamedTuple):
    """One verification: drafts that the target checked, and how many of them it accepted. Plain decoding has rounds of (0, 0)."""

    proposed: int
    accepted: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """What came of one prompt. All times but `compile_seconds` are without compilation; rows that decode together share theirs."""

    text: str | None  # without special tokens; None for a model without tokenizer
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]  # the stop token included
    finish_reason: Literal["stop", "length"]
    tau: float | None  # mean acceptance length: committed tokens per round, the target's own included; None without a round
    rounds: tuple[Round, ...]  # the first token comes out of the prompt and belongs to none
    non_finite_rounds: int  # rounds after which the draft's states had overflowed, so that nothing was proposed
    first_token_seconds: float  # from admission to the first token
    decode_seconds: float  # from the first token to the last
    compile_seconds: float

    @property
    def seconds(self) -> float:
        """From admission to the last token."""
        return self.first_token_seconds + self.decode_seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding speed: tokens after the first per second; `None` for a single token."""
        return (len(self.output_ids) - 1) / self.decode_seconds if len(self.output_ids) > 1 and self.decode_seconds > 0 else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamPiece:
    """New output of one prompt. `text` may be empty, while a character is unfinished and for models without tokenizer."""

    index: int  # of the prompt
    text: str
    ids: tuple[int, ...]


OnPiece = Callable[[StreamPiece], None]


def load(
    target: Path | str,
    draft: Path | str | None = None,
    *,
    dtype: DTypeLike = "bfloat16",
    num_speculative_tokens: int | None = None,
    max_seq_len: int | None = None,
    batch_size: int = 1,
    sample_from_anchor: bool | None = None,
    partial_rotary_factor: float | None = None,
    announce: Callable[[tuple[Choice, ...]], None] | None = None,
) -> Pipeline:
    """Load a target (Hugging Face directory, .gguf file or `smollm2`), and a draft for it, and allocate their caches.

    Without a draft the pipeline decodes plainly. `dtype`, bfloat16 or float32, is that of weights and caches; output in float32 is exactly that of
    plain decoding. `num_speculative_tokens` is k, the drafts per round, all of the block by default. The caches hold `batch_size` rows of
    `max_seq_len` tokens, prompt and output together; by default 2048, or what the target was made for if that is less. `sample_from_anchor` and
    `partial_rotary_factor` overrule the draft's files. What was decided is `Pipeline.choices`; `announce` gets it before the caches are allocated.

    Raises `DSparkError` for everything about the files or the arguments that does not fit.
    """
    started = time.perf_counter()
    overrides = DraftOverrides(sample_from_anchor=sample_from_anchor, partial_rotary_factor=partial_rotary_factor)
    _check_load_arguments(draft, num_speculative_tokens, overrides, batch_size)
    target_config = _checked_configs(target, draft, num_speculative_tokens, overrides)
    max_seq_len = _max_seq_len(max_seq_len, target_config)
    loaded_target = load_target(target, _checked_dtype(dtype))
    options = EngineOptions(
        num_speculative_tokens=num_speculative_tokens,
        max_seq_len=max_seq_len,
        batch_size=batch_size,
        max_stop_ids=max(8, len(loaded_target.stop_ids)),
    )
    loaded_draft = None if draft is None else load_draft(draft, loaded_target, _checked_dtype(dtype), overrides)
    return Pipeline(loaded_target, loaded_draft, options, started=started, announce=announce)


class Pipeline:
    """A loaded pair and its engine. Made by `load`."""

    def __init__(
        self,
        target: LoadedTarget,
        draft: LoadedDraft | None,
        options: EngineOptions,
        *,
        started: float | None = None,
        announce: Callable[[tuple[Choice, ...]], None] | None = None,
    ) -> None:
        started = time.perf_counter() if started is None else started
        self.target, self.draft, self.options = target, draft, options
        draft_module = None if draft is None else draft.module
        plan = KVPlan.of(target.module, draft_module, options)
        plan.check(device_memory())
        self.choices = load_choices(target, draft, options, plan)
        if announce is not None:
            announce(self.choices)
        try:
            self.engine = Engine(target.module, draft_module, options)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise RequestError(
                f"kv cache: no memory left for {in_bytes(plan.num_bytes)} (batch_size {options.batch_size}, max_seq_len {options.max_seq_len})"
            ) from error
        self.load_seconds = time.perf_counter() - started

    def warmup(self, *, stream: bool | None = None) -> int:
        """Compile every program that a request can need, so that none waits for a compiler; returns how many.

        `stream` restricts it to the driver that is used: true for streaming, false for the device loop.
        """
        return self.engine.warmup(stream=stream)

    def without_draft(self) -> Pipeline:
        """The same loaded target, decoding plainly, with caches of its own: for a comparison in one process."""
        return Pipeline(self.target, None, dataclasses.replace(self.options, num_speculative_tokens=None))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        confidence_threshold: float = 0.0,
        stop_ids: Sequence[int] | None = None,
        raw: bool = False,
        system: str | None = None,
        stream: OnPiece | None = None,
    ) -> list[GenerationResult]:
        """Continue one prompt or several, greedily; results come in the order of the prompts.

        A prompt is text, a list of token ids, or a list of messages (`{"role": ..., "content": ...}`). Text becomes a user message in the model's
        chat format, after a message `system` if given; with `raw`, and for models without a chat template, it is continued as it is.
        `confidence_threshold` leaves drafts unverified that the draft's confidence head believes in less; it needs such a head. `stop_ids` end an
        output, by default those that the model declares. `stream` is called with every `StreamPiece` as rounds complete; without it many rounds
        run on the device before the host sees their tokens, which is faster. Raises `RequestError` before anything runs.
        """
        requests = self.requests(
            prompts, max_new_tokens=max_new_tokens, confidence_threshold=confidence_threshold, stop_ids=stop_ids, raw=raw, system=system
        )
        done = dict(self.run(requests, stream=stream))
        return [done[index] for index in range(len(requests))]

    def requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        confidence_threshold: float = 0.0,
        stop_ids: Sequence[int] | None = None,
        raw: bool = False,
        system: str | None = None,
        names: Sequence[str] | None = None,
    ) -> list[Request]:
        """The checked requests that `generate` would run. `names` is what errors call each prompt, `prompts[0]` and so on by default."""
        self._check_threshold(confidence_threshold)
        given = as_prompts(prompts)
        stops = self.target.stop_ids if stop_ids is None else tuple(stop_ids)
        requests = []
        for index, prompt in enumerate(given):
            try:
                ids = encode_prompt(prompt, self.target.tokenizer, raw=raw, system=system, source=str(self.target.checkpoint.path))
                request = Request(
                    prompt_ids=tuple(ids), max_new_tokens=max_new_tokens, stop_ids=stops, confidence_threshold=float(confidence_threshold)
                )
                self.engine.check(request)
            except RequestError as error:
                if len(given) == 1 and not names:
                    raise
                raise RequestError(f"{names[index] if names else f'prompts[{index}]'}: {error}") from error
            requests.append(request)
        return requests

    def run(self, requests: Sequence[Request], *, stream: OnPiece | None = None) -> Iterator[tuple[int, GenerationResult]]:
        """Run requests; yields `(index, result)` as they finish."""
        outputs = [_Output(index, self.target, stream) for index in range(len(requests))]
        clock = CompileClock()
        with clock.watching():
            for index, completion in self.engine.run(requests, stream=stream is not None, on_tokens=lambda index, ids: outputs[index].add(ids)):
                yield index, outputs[index].result(completion, clock)

    def _check_threshold(self, confidence_threshold: float) -> None:
        """A threshold without a head that could be compared with it would do nothing."""
        if not confidence_threshold:
            return
        if self.draft is None:
            raise RequestError(f"confidence_threshold: found {confidence_threshold}, allowed only with a draft")
        if not self.draft.config.enable_confidence_head:
            raise RequestError(
                f"confidence_threshold: found {confidence_threshold}, allowed 0: {self.draft.config.source} describes a draft without confidence head"
            )


class _Output:
    """The output of one prompt while it grows: when its tokens came, and their text."""

    def __init__(self, index: int, target: LoadedTarget, on_piece: OnPiece | None) -> None:
        self._index, self._tokenizer, self._on_piece = index, target.tokenizer, on_piece
        self._decoder: StreamDecoder | None = target.tokenizer.stream_decoder() if on_piece and target.tokenizer else None
        self._first = self._last = 0.0

    def add(self, ids: Sequence[int]) -> None:
        """Tokens that have just reached the host."""
        self._last = time.perf_counter()
        self._first = self._first or self._last
        if self._on_piece is not None and ids:
            self._on_piece(StreamPiece(index=self._index, text=self._decoder.push(ids) if self._decoder else "", ids=tuple(ids)))

    def result(self, completion: Completion, clock: CompileClock) -> GenerationResult:
        """The finished output. JAX compiles a program when it is first needed, in the middle of a request; that time is taken out."""
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
            tau=completion.tau,
            rounds=tuple(Round(*pair) for pair in completion.rounds),
            non_finite_rounds=completion.non_finite_rounds,
            first_token_seconds=max(completion.prefill_seconds - compiled_first, 0.0),
            decode_seconds=max(completion.decode_seconds - compiled_later, 0.0),
            compile_seconds=compiled_first + compiled_later,
        )


def _checked_dtype(dtype: DTypeLike) -> DTypeLike:
    try:
        found = jnp.dtype(dtype).name
    except TypeError:
        found = str(dtype)
    if found not in _DTYPES:
        raise RequestError(f"dtype: found {found}, allowed {' or '.join(_DTYPES)}")
    return jnp.dtype(found)


def _check_load_arguments(draft: Path | str | None, num_speculative_tokens: int | None, overrides: DraftOverrides, batch_size: int) -> None:
    """What can be said before any file is read. An argument that would do nothing is an error."""
    if batch_size < 1:
        raise RequestError(f"batch_size: found {batch_size}, allowed 1 or more")
    if num_speculative_tokens is not None and (not isinstance(num_speculative_tokens, int) or isinstance(num_speculative_tokens, bool)):
        raise RequestError(f"num_speculative_tokens: found {num_speculative_tokens!r}, allowed an integer")
    of_drafts: Mapping[str, Any] = {"num_speculative_tokens": num_speculative_tokens, **dataclasses.asdict(overrides)}
    for name, value in of_drafts.items():
        if draft is None and value is not None:
            raise RequestError(f"{name}: found {value}, allowed only with a draft")


def _checked_configs(target: Path | str, draft: Path | str | None, num_speculative_tokens: int | None, overrides: DraftOverrides) -> Any:
    """The target's config, after everything that configs and headers can say: a user should not wait for weights to hear of a wrong draft."""
    target_config = parse_checkpoint(open_target(target), "target")[1]
    if draft is not None:
        config = parse_checkpoint(open_checkpoint(draft), "draft", overrides)[1]
        check_against(config, target_config)
        if num_speculative_tokens is not None and not 1 <= num_speculative_tokens <= config.num_drafts:
            reason = f"{config.source}: block of {config.block_size}"
            raise RequestError(f"num_speculative_tokens: found {num_speculative_tokens}, allowed 1..{config.num_drafts} ({reason})")
    return target_config


def _max_seq_len(asked: int | None, target_config: Any) -> int:
    longest = int(target_config.max_position_embeddings)
    if asked is None:
        return min(longest, DEFAULT_MAX_SEQ_LEN)
    if not 2 <= asked <= longest:
        raise RequestError(f"max_seq_len: found {asked}, allowed 2..{longest} ({target_config.source}: max_position_embeddings)")
    return asked
