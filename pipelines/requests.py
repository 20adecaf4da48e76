"""Makes checked requests from prompts and options. Needs configs and a tokenizer, but no weights."""

from __future__ import annotations

import dataclasses
import functools
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from dspark_jax.pipelines.sampling.continuations import Continuations
from dspark_jax.pipelines.sampling.generation import Generation, Request
from dspark_jax.pipelines.sampling.text_watch import NewWatch
from dspark_jax.pipelines.sampling.token_matcher import NewMatcher
from dspark_jax.pipelines.speculative.sizes import EnginePlan
from dspark_jax.pipelines.text.grammar_matcher import grammar_matcher
from dspark_jax.pipelines.text.prompts import Prompt, as_prompts, encode_prompt
from dspark_jax.pipelines.text.stop_strings import StoppedText, check_stop_strings
from dspark_jax.pipelines.text.tokenizer import Tokenizer
from dspark_jax.speculators_common.errors import RequestError
from dspark_jax.speculators_common.formats.draft_config import DraftConfig
from dspark_jax.speculators_common.scalars import is_integer

_MOST_CONTINUATIONS = 1024  # of one prompt
_DRAWN_SEEDS = 2**53  # every reader of JSON keeps such a number as it is


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """How text becomes token ids."""

    raw: bool = False  # continue the text as it is, without a chat template
    system: str | None = None  # a system message before the text
    template_vars: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # variables of the chat template


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestMaker:
    """Makes the requests of one pair, with the limits of one engine."""

    tokenizer: Tokenizer | None
    stop_ids: tuple[int, ...]  # of the model
    source: str  # the target, for messages
    draft: DraftConfig | None
    plan: EnginePlan

    def __call__(
        self,
        prompts: Prompt | Sequence[Prompt],
        generation: Generation | None = None,
        prompt_format: PromptFormat | None = None,
        *,
        n: int = 1,
        names: Sequence[str] | None = None,
    ) -> list[Request]:
        """The requests for `n` continuations of each prompt: those of the first prompt, then those of the second one.

        A prompt whose tokens are to be drawn at random gets a seed, if `generation` states none. `names` are the names
        of the prompts in errors, by default `prompts[0]` and so on. Raises `RequestError` for the first prompt or
        option that cannot be served.
        """
        generation = generation or Generation()
        if generation.stop_ids is None:
            generation = dataclasses.replace(generation, stop_ids=self.stop_ids)
        self.plan.check_generation(generation)
        check_threshold(generation.confidence_threshold, self.draft)
        check_stop_strings(generation.stop_strings, self.tokenizer, self.source)
        _check_count(n, generation)
        like = Request(
            prompt_ids=(),
            generation=generation,
            new_watch=self._new_watch(generation),
            new_matcher=self._new_matcher(generation),
        )
        given = as_prompts(prompts)
        made = [
            self._request(prompt, like, prompt_format or PromptFormat(), _name(index, len(given), names))
            for index, prompt in enumerate(given)
        ]
        return [dataclasses.replace(request, sample=sample) for request in made for sample in range(n)]

    def _request(self, prompt: Prompt, like: Request, prompt_format: PromptFormat, name: str) -> Request:
        try:
            ids = encode_prompt(
                prompt,
                self.tokenizer,
                raw=prompt_format.raw,
                system=prompt_format.system,
                template_vars=prompt_format.template_vars or None,
                source=self.source,
            )
            request = dataclasses.replace(like, prompt_ids=tuple(ids), generation=_with_seed(like.generation))
            self.plan.check(request)
        except RequestError as error:
            raise error.at(name) if name else error from None
        return request

    def _new_watch(self, generation: Generation) -> NewWatch | None:
        if self.tokenizer is None or not generation.stop_strings:
            return None
        return functools.partial(StoppedText, self.tokenizer, generation.stop_strings, generation.min_new_tokens)

    def _new_matcher(self, generation: Generation) -> NewMatcher | None:
        """Raises `RequestError` for a grammar that cannot be used, or that no text of this request matches."""
        if generation.grammar is None:
            return None
        new_matcher = grammar_matcher(
            generation.grammar, self.tokenizer, vocab_size=self.plan.vocab_size, source=self.source
        )
        if Continuations(new_matcher(), generation, self.plan.vocab_size).is_over:
            raise RequestError(
                field="grammar",
                found=generation.grammar.text,
                allowed="one that a text can begin with: no token may come first (stop tokens and banned ids count)",
            )
        return new_matcher


def _with_seed(generation: Generation) -> Generation:
    """With a seed of its own, if tokens are drawn at random and no seed is stated: then the text can be made again."""
    if not generation.samples or generation.seed is not None:
        return generation
    return dataclasses.replace(generation, seed=secrets.randbelow(_DRAWN_SEEDS))


def _check_count(n: int, generation: Generation) -> None:
    if not is_integer(n) or not 1 <= n <= _MOST_CONTINUATIONS:
        raise RequestError(field="n", found=n, allowed=f"1..{_MOST_CONTINUATIONS}")
    if n > 1 and not generation.samples:
        raise RequestError(field="n", found=n, allowed="1 in greedy decoding, where all continuations would be equal")


def check_threshold(confidence_threshold: float, draft: DraftConfig | None) -> None:
    """Raise `RequestError` for a threshold without a confidence head, where it would have no effect."""
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
    """The prompt's name in errors. A single prompt has none."""
    if names:
        return names[index]
    return f"prompts[{index}]" if count > 1 else ""
