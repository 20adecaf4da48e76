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
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dspark_jax.pipelines.checkpoints.load_choices import KVPlan, device_memory, in_bytes, load_choices
from dspark_jax.pipelines.checkpoints.loading import (
    LoadedDraft,
    LoadedTarget,
    PreparedDraft,
    PreparedTarget,
    prepare_draft,
    prepare_target,
    read_draft,
    read_target,
)
from dspark_jax.pipelines.compilation import CompileClock
from dspark_jax.pipelines.generation_result import GenerationResult, OnPiece, Output, Round, StreamPiece
from dspark_jax.pipelines.requests import check_num_speculative_tokens, checked_requests
from dspark_jax.pipelines.speculative.engine import Engine
from dspark_jax.pipelines.speculative.request import EngineOptions, Request, RequestLimits
from dspark_jax.pipelines.text.prompts import Prompt
from dspark_jax.speculators_common.errors import RequestError
from dspark_jax.speculators_common.formats.draft_config import Choice, DraftOverrides

__all__ = ["GenerationResult", "OnPiece", "Pipeline", "PreparedPipeline", "Round", "StreamPiece", "load", "prepare"]

DEFAULT_MAX_SEQ_LEN = 2048
DEFAULT_MAX_NEW_TOKENS = 256
_DTYPES = ("bfloat16", "float32")  # a draft's states overflow float16


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
    """Load a target (Hugging Face directory or id, .gguf file or `smollm2`), and a draft for it, and allocate their
    caches.

    Without a draft the pipeline decodes plainly. `dtype`, bfloat16 or float32, is that of weights and caches; output in
    float32 is exactly that of plain decoding. `num_speculative_tokens` is k, the drafts per round, all of the block by
    default. The caches hold `batch_size` rows of `max_seq_len` tokens, prompt and output together; by default 2048, or
    what the target was made for if that is less. `sample_from_anchor` and `partial_rotary_factor` overrule the draft's
    files. What was decided is `Pipeline.choices`; `announce` gets it before the caches are allocated.

    Raises `DSparkError` for everything about the files or the arguments that does not fit.
    """
    prepared = prepare(
        target,
        draft,
        dtype=dtype,
        num_speculative_tokens=num_speculative_tokens,
        max_seq_len=max_seq_len,
        batch_size=batch_size,
        sample_from_anchor=sample_from_anchor,
        partial_rotary_factor=partial_rotary_factor,
    )
    return prepared.load(announce=announce)


def prepare(
    target: Path | str,
    draft: Path | str | None = None,
    *,
    dtype: DTypeLike = "bfloat16",
    num_speculative_tokens: int | None = None,
    max_seq_len: int | None = None,
    batch_size: int = 1,
    sample_from_anchor: bool | None = None,
    partial_rotary_factor: float | None = None,
) -> PreparedPipeline:
    """The first half of `load`: everything but the weights, and all that can be wrong with files and arguments.
    Requests can be checked already.
    """
    started = time.perf_counter()
    overrides = DraftOverrides(sample_from_anchor=sample_from_anchor, partial_rotary_factor=partial_rotary_factor)
    _check_arguments(draft, num_speculative_tokens, overrides, batch_size)
    dtype = _checked_dtype(dtype)
    prepared_target = prepare_target(target, dtype)
    max_seq_len = _max_seq_len(max_seq_len, prepared_target.config)
    prepared_draft = None if draft is None else prepare_draft(draft, prepared_target, dtype, overrides)
    if prepared_draft is not None and num_speculative_tokens is not None:
        check_num_speculative_tokens(num_speculative_tokens, prepared_draft.config)
    options = EngineOptions(
        num_speculative_tokens=num_speculative_tokens,
        max_seq_len=max_seq_len,
        batch_size=batch_size,
        max_stop_ids=max(8, len(prepared_target.stop_ids)),
    )
    plan = KVPlan.of(prepared_target.abstract, None if prepared_draft is None else prepared_draft.abstract, options)
    plan.check(device_memory())
    return PreparedPipeline(target=prepared_target, draft=prepared_draft, options=options, started=started)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedPipeline:
    """A pair whose files and sizes were checked and whose weights are not read yet. Made by `prepare`."""

    target: PreparedTarget
    draft: PreparedDraft | None
    options: EngineOptions
    started: float

    def requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        confidence_threshold: float = 0.0,
        stop_ids: Sequence[int] | None = None,
        raw: bool = False,
        system: str | None = None,
        template_vars: Mapping[str, Any] | None = None,
        names: Sequence[str] | None = None,
    ) -> list[Request]:
        """The same as `Pipeline.requests` of the loaded pipeline."""
        draft = None if self.draft is None else self.draft.config
        num_drafts = 0 if draft is None else self.options.num_speculative_tokens or draft.num_drafts
        return checked_requests(
            prompts,
            target=self.target,
            draft=draft,
            limits=RequestLimits.of(self.options, vocab_size=int(self.target.config.vocab_size), num_drafts=num_drafts),
            max_new_tokens=max_new_tokens,
            confidence_threshold=confidence_threshold,
            stop_ids=stop_ids,
            raw=raw,
            system=system,
            template_vars=template_vars,
            names=names,
        )

    def load(self, *, announce: Callable[[tuple[Choice, ...]], None] | None = None) -> Pipeline:
        """Read the weights and allocate the caches; `announce` gets what was decided before the latter."""
        target = read_target(self.target)
        draft = None if self.draft is None else read_draft(self.draft)
        return Pipeline(target, draft, self.options, started=self.started, announce=announce)


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
                f"kv cache: no memory left for {in_bytes(plan.num_bytes)} (batch_size {options.batch_size}, "
                f"max_seq_len {options.max_seq_len})"
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
        template_vars: Mapping[str, Any] | None = None,
        stream: OnPiece | None = None,
    ) -> list[GenerationResult]:
        """Continue one prompt or several, greedily; results come in the order of the prompts.

        A prompt is text, a list of token ids, or a list of messages (`{"role": ..., "content": ...}`, see
        `checked_messages`). Text becomes a user message in the model's chat format, after a message `system` if given;
        with `raw`, and for models without a chat template, it is continued as it is. `template_vars` are further
        variables of the chat template, such as `{"enable_thinking": False}`. `confidence_threshold` leaves drafts
        unverified that the draft's confidence head believes in less; it needs such a head. `stop_ids` end an output, by
        default those that the model declares. `stream` is called with every `StreamPiece` as rounds complete; without
        it many rounds run on the device before the host sees their tokens, which is faster. Raises `RequestError`
        before anything runs.
        """
        requests = self.requests(
            prompts,
            max_new_tokens=max_new_tokens,
            confidence_threshold=confidence_threshold,
            stop_ids=stop_ids,
            raw=raw,
            system=system,
            template_vars=template_vars,
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
        template_vars: Mapping[str, Any] | None = None,
        names: Sequence[str] | None = None,
    ) -> list[Request]:
        """The checked requests that `generate` would run. `names` is what errors call each prompt, `prompts[0]` and so
        on by default.
        """
        return checked_requests(
            prompts,
            target=self.target,
            draft=None if self.draft is None else self.draft.config,
            limits=self.engine.limits,
            max_new_tokens=max_new_tokens,
            confidence_threshold=confidence_threshold,
            stop_ids=stop_ids,
            raw=raw,
            system=system,
            template_vars=template_vars,
            names=names,
        )

    def run(
        self, requests: Sequence[Request], *, stream: OnPiece | None = None
    ) -> Iterator[tuple[int, GenerationResult]]:
        """Run requests; yields `(index, result)` as they finish."""
        outputs = [Output(index, self.target, stream) for index in range(len(requests))]
        clock = CompileClock()
        with clock.watching():
            for index, completion in self.engine.run(
                requests, stream=stream is not None, on_tokens=lambda index, ids: outputs[index].add(ids)
            ):
                yield index, outputs[index].result(completion, clock)


def _checked_dtype(dtype: DTypeLike) -> DTypeLike:
    try:
        found = jnp.dtype(dtype).name
    except TypeError:
        found = str(dtype)
    if found not in _DTYPES:
        raise RequestError(f"dtype: found {found}, allowed {' or '.join(_DTYPES)}")
    return jnp.dtype(found)


def _check_arguments(
    draft: Path | str | None, num_speculative_tokens: int | None, overrides: DraftOverrides, batch_size: int
) -> None:
    """What can be said before any file is read. An argument that would do nothing is an error."""
    if batch_size < 1:
        raise RequestError(f"batch_size: found {batch_size}, allowed 1 or more")
    if num_speculative_tokens is not None and (
        not isinstance(num_speculative_tokens, int) or isinstance(num_speculative_tokens, bool)
    ):
        raise RequestError(f"num_speculative_tokens: found {num_speculative_tokens!r}, allowed an integer")
    of_drafts: Mapping[str, Any] = {"num_speculative_tokens": num_speculative_tokens, **dataclasses.asdict(overrides)}
    for name, value in of_drafts.items():
        if draft is None and value is not None:
            raise RequestError(f"{name}: found {value}, allowed only with a draft")


def _max_seq_len(asked: int | None, target_config: Any) -> int:
    longest = int(target_config.max_position_embeddings)
    if asked is None:
        return min(longest, DEFAULT_MAX_SEQ_LEN)
    if not 2 <= asked <= longest:
        raise RequestError(
            f"max_seq_len: found {asked}, allowed 2..{longest} ({target_config.source}: max_position_embeddings)"
        )
    return asked
