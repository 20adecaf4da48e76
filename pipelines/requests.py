"""What a caller asks -> checked requests; needs configs and a tokenizer, no weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dspark_jax.pipelines.speculative.generation import Generation, Request
from dspark_jax.pipelines.speculative.sizes import EnginePlan
from dspark_jax.pipelines.text.prompts import Prompt, as_prompts, encode_prompt
from dspark_jax.pipelines.text.tokenizer import Tokenizer
from dspark_jax.speculators_common.errors import RequestError
from dspark_jax.speculators_common.formats.draft_config import DraftConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """How text becomes a prompt."""

    raw: bool = False  # no chat template: the text is continued as it is
    system: str | None = None  # a system message before a text
    template_vars: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # for the chat template


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestMaker:
    """Makes requests for one pair and one engine: made when the pair is prepared, the same once it is loaded."""

    tokenizer: Tokenizer | None
    stop_ids: tuple[int, ...]  # that the model declares
    source: str  # the target, for messages
    draft: DraftConfig | None
    plan: EnginePlan

    def __call__(
        self,
        prompts: Prompt | Sequence[Prompt],
        generation: Generation | None = None,
        prompt_format: PromptFormat | None = None,
        *,
        names: Sequence[str] | None = None,
    ) -> list[Request]:
        """One request per prompt, in their order. `names` is what errors call each prompt, `prompts[0]` and so on by
        default.

        Raises `RequestError` for the first prompt or option that the engine cannot serve.
        """
        generation = generation or Generation()
        if generation.stop_ids is None:
            generation = dataclasses.replace(generation, stop_ids=self.stop_ids)
        check_threshold(generation.confidence_threshold, self.draft)
        self.plan.check_generation(generation)
        given = as_prompts(prompts)
        return [
            self._request(prompt, generation, prompt_format or PromptFormat(), _name(index, len(given), names))
            for index, prompt in enumerate(given)
        ]

    def _request(self, prompt: Any, generation: Generation, prompt_format: PromptFormat, name: str) -> Request:
        try:
            ids = encode_prompt(
                prompt,
                self.tokenizer,
                raw=prompt_format.raw,
                system=prompt_format.system,
                template_vars=prompt_format.template_vars or None,
                source=self.source,
            )
            request = Request(prompt_ids=tuple(ids), generation=generation)
            self.plan.check(request)
        except RequestError as error:
            raise error.at(name) if name else error from None
        return request


def check_threshold(confidence_threshold: float, draft: DraftConfig | None) -> None:
    """A threshold without a head that could be compared with it would do nothing: a `RequestError`."""
    if not confidence_threshold:
        return
    if draft is None:
        raise RequestError(field="confidence_threshold", found=confidence_threshold, allowed="only with a draft")
    if not draft.enable_confidence_head:
        raise RequestError(
            field="confidence_threshold",
            found=confidence_threshold,
            allowed=f"0: {draft.source} describes a draft without confidence head",
        )


def _name(index: int, count: int, names: Sequence[str] | None) -> str:
    """What an error calls the prompt; a single one needs no name."""
    if names:
        return names[index]
    return f"prompts[{index}]" if count > 1 else ""
