"""What is asked of one text: the one object that goes from a flag or an argument down to the row that decodes it."""

from __future__ import annotations

import dataclasses
from typing import TypedDict

DEFAULT_MAX_NEW_TOKENS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """How a prompt is to be continued."""

    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    stop_ids: tuple[int, ...] | None = None  # tokens that end the text; None: those that the model declares
    confidence_threshold: float = 0.0  # drafts are offered up to the first one below it; 0: as the draft decides


class GenerationFields(TypedDict, total=False):
    """The fields of `Generation` as keywords: what `Pipeline.generate` takes."""

    max_new_tokens: int
    stop_ids: tuple[int, ...] | list[int] | None
    confidence_threshold: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and how it is to be continued."""

    prompt_ids: tuple[int, ...]
    generation: Generation = Generation()

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end the text; an engine knows no model whose declaration could be meant by `None`."""
        return self.generation.stop_ids or ()
