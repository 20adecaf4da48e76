"""A watch that ends a text at a sequence of token ids, for tests of engines without text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dspark_jax.pipelines.sampling.generation import Request


class SequenceWatch:
    """Ends the text with the last token of `sequence`."""

    def __init__(self, sequence: Sequence[int]) -> None:
        self._sequence, self._seen = list(sequence), list[int]()

    def push(self, ids: Sequence[int]) -> int | None:
        """As in `TextWatch`."""
        for count, token in enumerate(ids, start=1):
            self._seen.append(token)
            if self._seen[-len(self._sequence) :] == self._sequence:
                return count
        return None


def watched(request: Request, sequence: Sequence[int]) -> Request:
    """The request, with a text that ends at `sequence`."""
    return dataclasses.replace(request, new_watch=lambda: SequenceWatch(sequence))
