"""The options and prompts of a benchmark, and their checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike

from dspark_jax.pipelines.checkpoints.loading import AnyDraft, AnyTarget
from dspark_jax.pipelines.requests import check_threshold
from dspark_jax.pipelines.sampling.checks import check_generation
from dspark_jax.pipelines.sampling.generation import Generation
from dspark_jax.pipelines.speculative.sizes import PROPOSAL_KINDS, EngineOptions, ProposalKind, drafts_per_round
from dspark_jax.speculators_common.errors import RequestError

GREEDY = Generation()
ALL_SETS = "all"  # the name of all prompt sets together


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptSet:
    """Prompts that are reported together, as token ids."""

    name: str
    prompts: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    """What is measured."""

    num_speculative_tokens: tuple[int, ...] = ()  # the k to measure; empty = D, all that the block gives
    max_new_tokens: int = 96
    repeats: int = 3
    confidence_threshold: float = 0.0
    sampling: Generation = GREEDY  # temperature, filters and penalties of every prompt
    sampled_rows: tuple[int, ...] = (1, 8)  # rows of the rounds that are timed with these controls and greedily
    dtype: DTypeLike = jnp.bfloat16  # of the loaded modules
    bandwidth_bytes: int = 1 << 29  # size of the array whose reading gives the bandwidth

    @property
    def proposals(self) -> tuple[ProposalKind, ...]:
        """The kinds of proposal to measure: both at a temperature. In greedy decoding they are the same."""
        return PROPOSAL_KINDS if self.sampling.samples else ("argmax",)


def check_benchmark(
    target: AnyTarget, draft: AnyDraft | None, sets: Sequence[PromptSet], options: BenchmarkOptions
) -> tuple[int, ...]:
    """The k to measure, each once, in the given order; empty without a draft.

    Raises `RequestError` for options that the pair or the prompts do not allow.
    """
    _check_prompts(target, sets, options)
    sizes = EngineOptions()
    check_generation(
        options.sampling,
        vocab_size=target.config.vocab_size,
        most_stop_ids=sizes.max_stop_ids,
        most_biased_ids=sizes.max_biased_ids,
    )
    asked = tuple(dict.fromkeys(options.num_speculative_tokens))
    check_threshold(options.confidence_threshold, None if draft is None else draft.config)
    if draft is None:
        if asked:
            raise RequestError(
                f"found {', '.join(map(str, asked))}, allowed only with a draft",
                field="num_speculative_tokens",
                found=asked,
                allowed="only with a draft",
            )
        return ()
    for k in asked:
        drafts_per_round(draft.config, k)
    return asked or (draft.config.max_drafts,)


def _check_prompts(target: AnyTarget, sets: Sequence[PromptSet], options: BenchmarkOptions) -> None:
    if options.max_new_tokens < 2:
        raise RequestError(
            field="max_new_tokens",
            found=options.max_new_tokens,
            allowed="2 or more: the first token belongs to no round",
        )
    if options.repeats < 1:
        raise RequestError(field="repeats", found=options.repeats, allowed="1 or more")
    if not sets or any(not prompt_set.prompts for prompt_set in sets):
        allowed = "at least one set and one prompt in each"
        raise RequestError(f"found none in a set, allowed {allowed}", field="prompts", found=sets, allowed=allowed)
    names = [prompt_set.name for prompt_set in sets]
    if len({*names, ALL_SETS}) <= len(names):
        allowed = f"different names, none of them {ALL_SETS!r}"
        raise RequestError(
            f"found sets {', '.join(names)}, allowed {allowed}", field="prompts", found=names, allowed=allowed
        )
    limit = target.config.max_position_embeddings
    for prompt_set in sets:
        for index, ids in enumerate(prompt_set.prompts):
            if len(ids) + options.max_new_tokens > limit:
                found = f"{len(ids)} tokens and {options.max_new_tokens} new ones"
                allowed = f"{limit} together (max_position_embeddings)"
                raise RequestError(
                    f"found {found}, allowed {allowed}",
                    file=prompt_set.name,
                    field=f"prompt {index + 1}",
                    found=found,
                    allowed=allowed,
                )
