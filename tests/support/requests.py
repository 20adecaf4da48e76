"""Makes a request from a prompt and the fields of its `Generation`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspark_jax.pipelines.sampling.generation import Generation, Request


def request_for(*, prompt_ids: Sequence[int], **generation: Any) -> Request:
    """A request for these ids; the other arguments are fields of `Generation`."""
    return Request(prompt_ids=tuple(prompt_ids), generation=Generation(**generation))
