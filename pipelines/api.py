"""The Python interface: load a target and a draft, then generate.

pipeline = dspark_jax.load("smollm2", "models/smollm2-135m-dspark")
[result] = pipeline.generate("What is the capital of France?", max_new_tokens=40)
print(result.text, result.tau)
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dspark_jax.architectures.target_config import TargetConfig
from dspark_jax.pipelines.checkpoints.generation_config import stated_generation
from dspark_jax.pipelines.checkpoints.hub import check_name
from dspark_jax.pipelines.checkpoints.load_choices import check_memory, device_memory, in_bytes, load_choices
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
from dspark_jax.pipelines.generation_result import GenerationResult, Output, Round, StreamPiece
from dspark_jax.pipelines.requests import PromptFormat, RequestMaker
from dspark_jax.pipelines.sampling.generation import Generation, GenerationFields, Request, changed
from dspark_jax.pipelines.sampling.grammar import Grammar
from dspark_jax.pipelines.sampling.policy import Policy
from dspark_jax.pipelines.sampling.rules import Rule, parse_rule
from dspark_jax.pipelines.speculative.default_drafts import default_drafts
from dspark_jax.pipelines.speculative.engine import Engine, plan_of
from dspark_jax.pipelines.speculative.sizes import (
    PROPOSAL_KINDS,
    EngineOptions,
    EnginePlan,
    ProposalKind,
    drafts_per_round,
)
from dspark_jax.pipelines.text.prompts import Prompt
from dspark_jax.speculators_common.errors import DSparkError, RequestError
from dspark_jax.speculators_common.formats.choice import Choice
from dspark_jax.speculators_common.formats.draft_config import DraftOverrides
from dspark_jax.speculators_common.scalars import is_integer, is_number

__all__ = [
    "DSparkError",
    "Generation",
    "GenerationResult",
    "Grammar",
    "Pipeline",
    "PreparedPipeline",
    "PromptFormat",
    "Round",
    "StreamPiece",
    "load",
    "prepare",
]

DEFAULT_MAX_SEQ_LEN = 2048
_MOST_ROWS = 2**31 - 1  # of an int32 index
_DTYPES = ("bfloat16", "float32")  # a draft's states overflow float16
Announce = Callable[[tuple[Choice, ...]], None]


class PairFields(TypedDict, total=False):
    """The keyword arguments of `prepare`."""

    dtype: DTypeLike
    num_speculative_tokens: int | None
    max_seq_len: int | None
    batch_size: int
    sample_from_anchor: bool | None
    partial_rotary_factor: float | None
    proposal: ProposalKind
    acceptance: Rule | str | None


def load(
    target: Path | str,
    draft: Path | str | None = None,
    *,
    announce: Announce | None = None,
    **pair: Unpack[PairFields],
) -> Pipeline:
    """Load a pair: `prepare` it, read its weights and allocate its caches. Arguments as in `prepare`.

    `announce` is called with the choices before the caches are allocated. Raises `DSparkError` for files or arguments
    that cannot be used.
    """
    return prepare(target, draft, **pair).load(announce=announce)


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
    proposal: ProposalKind = "argmax",
    acceptance: Rule | str | None = None,
) -> PreparedPipeline:
    """Check a target, and a draft for it, without reading their weights.

    `target` is a Hugging Face directory or id, a .gguf file or `smollm2`; `draft` is a Hugging Face directory or id.
    Without a draft the pipeline decodes plainly. `dtype`, bfloat16 or float32, is the type of weights and caches; in
    float32 the output is token for token that of plain decoding. `num_speculative_tokens` is k, the drafts per round;
    the default is a number that is fast on this platform. The caches hold `batch_size` rows of `max_seq_len` tokens,
    prompt and output together; the default is 2048, or the target's maximum if that is less. `sample_from_anchor` and
    `partial_rotary_factor` override the draft's files. `proposal` says how drafts are chosen for requests with a
    temperature: with "argmax", the most probable ones, a seed gives the text of plain decoding; with "sampled", drawn
    at random, more of them may be accepted, and the text is another one of the same distribution. `acceptance` is a
    rule that is not exact, such as "relaxed" or "synthetic:0.7" (`docs/sampling.md`).

    Every fault in files and arguments is found here, as a `DSparkError`. The prepared pipeline can already check
    requests. `Pipeline.choices` lists the choices that were made.
    """
    started = time.perf_counter()
    overrides = DraftOverrides(sample_from_anchor=sample_from_anchor, partial_rotary_factor=partial_rotary_factor)
    _check_arguments(target, draft, num_speculative_tokens, overrides, batch_size, proposal)
    dtype = _checked_dtype(dtype)
    prepared_target = prepare_target(target, dtype)
    max_seq_len = _max_seq_len(max_seq_len, prepared_target.config)
    prepared_draft = None if draft is None else prepare_draft(draft, prepared_target, dtype, overrides)
    why = ""
    if prepared_draft is not None:
        if num_speculative_tokens is None:
            num_speculative_tokens, why = default_drafts(prepared_draft.config, jax.default_backend())
        drafts_per_round(prepared_draft.config, num_speculative_tokens)
    options = EngineOptions(
        num_speculative_tokens=num_speculative_tokens,
        max_seq_len=max_seq_len,
        batch_size=batch_size,
        max_stop_ids=max(8, len(prepared_target.stop_ids)),
        proposal=proposal,
        acceptance=parse_rule(acceptance) if isinstance(acceptance, str) else acceptance,
    )
    plan = plan_of(prepared_target.abstract, None if prepared_draft is None else prepared_draft.abstract, options)
    check_memory(plan, device_memory())
    return PreparedPipeline(target=prepared_target, draft=prepared_draft, plan=plan, k_reason=why, started=started)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedPipeline:
    """A pair whose files and sizes are checked and whose weights are not read yet. Made by `prepare`."""

    target: PreparedTarget
    draft: PreparedDraft | None
    plan: EnginePlan
    k_reason: str  # why k is what it is; empty if the caller stated k
    started: float  # `time.perf_counter` when `prepare` began

    @property
    def requests(self) -> RequestMaker:
        """Makes checked requests. The loaded pipeline uses the same one."""
        return RequestMaker(
            tokenizer=self.target.tokenizer,
            stop_ids=self.target.stop_ids,
            source=str(self.target.checkpoint.path),
            draft=None if self.draft is None else self.draft.config,
            plan=self.plan,
        )

    def load(self, *, announce: Announce | None = None) -> Pipeline:
        """Read the weights and allocate the caches. `announce` is called with the choices before the allocation."""
        target = read_target(self.target)
        return Pipeline(self, target, None if self.draft is None else read_draft(self.draft), announce=announce)


class Pipeline:
    """A loaded pair and its engine. Made by `load`."""

    def __init__(
        self,
        prepared: PreparedPipeline,
        target: LoadedTarget,
        draft: LoadedDraft | None,
        *,
        announce: Announce | None = None,
    ) -> None:
        self._prepared, self.target, self.draft = prepared, target, draft
        self.plan, self.requests = prepared.plan, prepared.requests
        self.choices = load_choices(target, draft, self.plan, prepared.k_reason)
        if announce is not None:
            announce(self.choices)
        try:
            self.engine = Engine(target.module, None if draft is None else draft.module, plan=self.plan)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):  # the JAX error has no status field
                raise
            options = self.plan.options
            raise RequestError(
                f"no memory left for {in_bytes(self.plan.kv_bytes)} "
                f"(batch_size {options.batch_size}, max_seq_len {options.max_seq_len})",
                field="kv cache",
                found=self.plan.kv_bytes,
            ) from error
        self.load_seconds = time.perf_counter() - prepared.started

    def warmup(self, *, stream: bool | None = None, generations: Sequence[Generation] = ()) -> int:
        """Compile every program that requests need, so that no request has to wait; returns their number.

        `generations` are options like those of the requests; only which controls are in use matters, not their values.
        By default they are greedy. `stream` restricts it to one driver: true for streaming and for requests with stop
        strings or a grammar, false for the device loop.
        """
        return self.engine.warmup(stream=stream, policies=Policy.mixtures(generations or [Generation()]))

    def stated_generation(self) -> Generation:
        """The options that the target's generation_config.json states; greedy decoding unless it says `do_sample`.

        Raises `DSparkError` if there is no such file, and for rules in it that cannot be kept.
        """
        return changed(Generation(), stated_generation(self.target.checkpoint, self.plan.vocab_size).fields)

    def without_draft(self) -> Pipeline:
        """A pipeline that decodes plainly with the same loaded target and its own caches, for comparisons."""
        options = dataclasses.replace(self.plan.options, num_speculative_tokens=None, acceptance=None)
        plan = plan_of(self.target.module, None, options)
        check_memory(plan, device_memory())
        started = time.perf_counter()
        plain = dataclasses.replace(self._prepared, draft=None, plan=plan, k_reason="", started=started)
        return Pipeline(plain, self.target, None)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        generation: Generation | None = None,
        prompt_format: PromptFormat | None = None,
        *,
        n: int = 1,
        **changes: Unpack[GenerationFields],
    ) -> list[GenerationResult]:
        """Continue one prompt or several, each `n` times; returns the results prompt by prompt.

        A prompt is text, a list of token ids, or a list of messages (`{"role": ..., "content": ...}`). Text becomes a
        user message in the model's chat format, unless `prompt_format` says otherwise; for models without a chat
        template it is continued as it is. `generation` holds the options, greedy decoding by default; its fields can
        be given as keywords (`max_new_tokens=40`, `temperature=0.7`). Many rounds run on the device before the host
        reads their tokens, which is faster than `stream`; with stop strings or a grammar it reads them after every
        round. Raises `RequestError` for prompts and options that cannot be served, before any request runs.
        """
        requests = self.requests(prompts, changed(generation or Generation(), changes), prompt_format, n=n)
        done = {piece.index: piece.result for piece in self.run(requests) if piece.result is not None}
        return [done[index] for index in range(len(requests))]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        generation: Generation | None = None,
        prompt_format: PromptFormat | None = None,
        *,
        n: int = 1,
        **changes: Unpack[GenerationFields],
    ) -> Generator[StreamPiece, None, None]:
        """Continue prompts as `generate` does, and yield each output piece by piece, as rounds complete.

        The texts and ids of an output's pieces, joined, are those of its result, which is in its last piece. Closing
        the iterator cancels the outputs that have not ended, and frees their rows: put it into `contextlib.closing`, or
        leave the loop and drop the iterator. Until then no other prompt can be continued. Raises as `generate` does,
        when it is called.
        """
        requests = self.requests(prompts, changed(generation or Generation(), changes), prompt_format, n=n)
        return self.run(requests, stream=True)

    def run(self, requests: Sequence[Request], *, stream: bool = False) -> Generator[StreamPiece, None, None]:
        """Run requests, and yield the pieces of their outputs as they reach the host. With `stream` that is after every
        round; otherwise after every device loop, and the pieces have no text.
        """
        acceptance = str(self.plan.options.acceptance or "exact")
        outputs = [
            Output(index, request, self.target.tokenizer, acceptance=acceptance, stream=stream)
            for index, request in enumerate(requests)
        ]
        clock = CompileClock()
        with clock.watching(), contextlib.closing(self.engine.run(requests, stream=stream)) as events:
            for index, event in events:
                yield outputs[index].piece(event, clock)


def _checked_dtype(dtype: DTypeLike) -> DTypeLike:
    try:
        found = jnp.dtype(dtype).name
    except TypeError:
        found = str(dtype)
    allowed = " or ".join(_DTYPES)
    if found not in _DTYPES:
        raise RequestError(f"found {found}, allowed {allowed}", field="dtype", found=found, allowed=allowed)
    return jnp.dtype(found)


def _check_arguments(
    target: Path | str,
    draft: Path | str | None,
    num_speculative_tokens: int | None,
    overrides: DraftOverrides,
    batch_size: int,
    proposal: ProposalKind,
) -> None:
    """Raise `RequestError` for what is wrong without knowing the files, such as a draft option without a draft."""
    check_name(target, "target", others="a .gguf file, smollm2 ")
    if draft is not None:
        check_name(draft, "draft")
    if not is_integer(batch_size) or batch_size < 1:
        raise RequestError(field="batch_size", found=batch_size, allowed="1 or more")
    if batch_size > _MOST_ROWS:
        raise RequestError(field="batch_size", found=batch_size, allowed=f"1..{_MOST_ROWS}")
    if num_speculative_tokens is not None and not is_integer(num_speculative_tokens):
        raise RequestError(field="num_speculative_tokens", found=num_speculative_tokens, allowed="an integer")
    if not isinstance(overrides.sample_from_anchor, bool | None):
        raise RequestError(field="sample_from_anchor", found=overrides.sample_from_anchor, allowed="true or false")
    if overrides.partial_rotary_factor is not None and not is_number(overrides.partial_rotary_factor):
        raise RequestError(field="partial_rotary_factor", found=overrides.partial_rotary_factor, allowed="a number")
    if proposal not in PROPOSAL_KINDS:
        raise RequestError(field="proposal", found=proposal, allowed=" or ".join(PROPOSAL_KINDS))
    draft_options: Mapping[str, object] = {
        "num_speculative_tokens": num_speculative_tokens,
        "proposal": None if proposal == "argmax" else proposal,
        **dataclasses.asdict(overrides),
    }
    for name, value in draft_options.items():
        if draft is None and value is not None:
            raise RequestError(field=name, found=value, allowed="only with a draft")


def _max_seq_len(asked: int | None, target_config: TargetConfig) -> int:
    longest = target_config.max_position_embeddings
    if asked is None:
        return min(longest, DEFAULT_MAX_SEQ_LEN)
    if not is_integer(asked) or not 2 <= asked <= longest:
        raise RequestError(
            field="max_seq_len",
            found=asked,
            allowed=f"2..{longest} ({target_config.source}: max_position_embeddings)",
        )
    return asked
