"""How a prompt is to be continued: one object, handed on from the command line or Python call down to the row."""

from __future__ import annotations

import dataclasses
from typing import TypedDict

DEFAULT_MAX_NEW_TOKENS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """The options of one continuation."""

    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    stop_ids: tuple[int, ...] | None = None  # tokens that end the text; None = those of the model
    confidence_threshold: float = 0.0  # a proposal ends before the first draft below it; 0 = the draft decides


class GenerationFields(TypedDict, total=False):
    """The fields of `Generation` as keyword arguments of `Pipeline.generate`."""

    max_new_tokens: int
    stop_ids: tuple[int, ...] | list[int] | None
    confidence_threshold: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt as token ids, and the options of its continuation."""

    prompt_ids: tuple[int, ...]
    generation: Generation = Generation()

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end the text. `None` in `generation` means none here: an engine does not know the model's."""
        return self.generation.stop_ids or ()
