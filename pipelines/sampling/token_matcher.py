"""What a grammar must offer: a matcher that reads the tokens of one text, and says which may come next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt32


@runtime_checkable
class TokenMatcher(Protocol):
    """Reads the tokens of one text, and says how it may go on. It knows no stop tokens.

    A bit mask has bit `id % 32` of word `id // 32` for each token id. Words that are missing at its end are zero.
    """

    def allowed(self) -> UInt32[np.ndarray, "words"]:
        """The tokens that may come next, as a bit mask; it is not changed later."""
        ...

    def is_complete(self) -> bool:
        """Whether the text may end here."""
        ...

    def push(self, token: int) -> bool:
        """Read one more token. Returns false, and changes nothing, if it may not come next."""
        ...

    def is_broken(self) -> bool:
        """Whether the matcher has given up: the text became too complex for it. Then nothing is allowed."""
        ...

    def copy(self) -> TokenMatcher:
        """A matcher that has read the same tokens. What it reads later, this one does not."""
        ...


NewMatcher = Callable[[], TokenMatcher]  # a matcher holds state, so every run of a request needs a new one
