"""What a caller asks -> checked requests; needs configs and a tokenizer, no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dspark_jax.pipelines.checkpoints.loading import AnyTarget
from dspark_jax.pipelines.speculative.request import Request, RequestLimits
from dspark_jax.pipelines.text.prompts import Prompt, as_prompts, encode_prompt
from dspark_jax.speculators_common.errors import RequestError
from dspark_jax.speculators_common.formats.draft_config import DraftConfig


def checked_requests(
    prompts: Prompt | Sequence[Prompt],
    *,
    target: AnyTarget,
    draft: DraftConfig | None,
    limits: RequestLimits,
    max_new_tokens: int,
    confidence_threshold: float,
    stop_ids: Sequence[int] | None,
    raw: bool,
    system: str | None,
    template_vars: Mapping[str, Any] | None,
    names: Sequence[str] | None,
) -> list[Request]:
    """One request per prompt, in their order. `names` is what errors call each prompt, `prompts[0]` and so on by
    default.

    Raises `RequestError` for the first prompt or option that an engine of these `limits` cannot serve.
    """
    check_threshold(confidence_threshold, draft)
    given = as_prompts(prompts)
    stops = target.stop_ids if stop_ids is None else tuple(stop_ids)
    # A prompt that is always fine: what is wrong with the options is not the fault of one of the prompts.
    limits.check(
        Request(
            prompt_ids=(0,),
            max_new_tokens=max_new_tokens,
            stop_ids=stops,
            confidence_threshold=float(confidence_threshold),
        )
    )
    requests = []
    for index, prompt in enumerate(given):
        try:
            ids = encode_prompt(
                prompt,
                target.tokenizer,
                raw=raw,
                system=system,
                template_vars=template_vars,
                source=str(target.checkpoint.path),
            )
            request = Request(
                prompt_ids=tuple(ids),
                max_new_tokens=max_new_tokens,
                stop_ids=stops,
                confidence_threshold=float(confidence_threshold),
            )
            limits.check(request)
        except RequestError as error:
            if len(given) == 1 and not names:
                raise
            raise RequestError(f"{names[index] if names else f'prompts[{index}]'}: {error}") from error
        requests.append(request)
    return requests


def check_threshold(confidence_threshold: float, draft: DraftConfig | None) -> None:
    """A threshold without a head that could be compared with it would do nothing: a `RequestError`."""
    if not confidence_threshold:
        return
    if draft is None:
        raise RequestError(f"confidence_threshold: found {confidence_threshold}, allowed only with a draft")
    if not draft.enable_confidence_head:
        raise RequestError(
            f"confidence_threshold: found {confidence_threshold}, allowed 0: {draft.source} describes a draft without "
            "confidence head"
        )


def check_num_speculative_tokens(asked: int, draft: DraftConfig) -> None:
    """Raise a `RequestError` for more drafts per round than a block gives."""
    if not 1 <= asked <= draft.num_drafts:
        raise RequestError(
            f"num_speculative_tokens: found {asked}, allowed 1..{draft.num_drafts} ({draft.source}: block of "
            f"{draft.block_size})"
        )
