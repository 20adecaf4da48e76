"""What ends a text besides stop tokens and budgets: a watch that reads the tokens of one request on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class TextWatch(Protocol):
    """Reads the tokens of one request as they are emitted, and says where its text ends."""

    def push(self, ids: Sequence[int]) -> int | None:
        """How many of these new `ids` belong to the text, if it ends within them: 1 to `len(ids)`. Otherwise `None`."""
        ...


NewWatch = Callable[[], TextWatch]  # a watch holds state, so every run of a request needs a new one
