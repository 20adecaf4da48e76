"""Which tokens may come next in the text of one request: by its grammar, its stop tokens and its banned ids.

All of it runs on the host. The round gets one mask for each token that it verifies, see `token_masks.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt32

from dspark_jax.pipelines.sampling.generation import Generation
from dspark_jax.pipelines.sampling.token_masks import full_words, has_token, words_of
from dspark_jax.pipelines.sampling.token_matcher import TokenMatcher


class Continuations:
    """How the text of one request may go on. Stop tokens are allowed where the text may end, and nowhere else; banned
    ids are allowed nowhere.

    If no token is allowed, the text ends: its grammar is complete and there is no stop token, or options of the request
    forbid all tokens that the grammar allows.
    """

    def __init__(self, matcher: TokenMatcher, generation: Generation, vocab_size: int) -> None:
        self._matcher, self._min_new_tokens = matcher, generation.min_new_tokens
        self._stops = frozenset(generation.stop_ids or ())
        self._banned = frozenset(generation.banned_ids)
        self._vocabulary = full_words(vocab_size)
        self._ordinary = self._vocabulary & ~words_of(self._stops | self._banned, vocab_size)
        self._ends = words_of(self._stops - self._banned, vocab_size)
        self._num_tokens = 0
        self._next = self._allowed(0)

    @property
    def is_over(self) -> bool:
        """Whether no token may come next."""
        return not self._next.any()

    def masks(self, drafts: Sequence[int]) -> UInt32[np.ndarray, "rows words"]:
        """The tokens that may come next, and those after each draft, up to the first draft that may not stand there.

        One row more than there are drafts that may stand there. After a stop token nothing matters, and no further row
        follows.
        """
        rows, count = [self._next], 0
        for draft in drafts:
            if not has_token(rows[-1], draft):
                break
            if draft in self._stops:
                rows.append(self._vocabulary)
                break
            if not self._matcher.push(draft):
                break
            count += 1
            rows.append(self._allowed(count))
        self._matcher.pop(count)
        return np.stack(rows)

    def advance(self, tokens: Sequence[int]) -> int | None:
        """Read emitted tokens. Returns how many of them belong to the text, if it ends within them or after them
        because nothing may follow; `None` otherwise, and after a stop token.

        A token that may not stand there is emitted where nothing may follow: it is no part of the text.
        """
        for index, token in enumerate(tokens):
            if token in self._stops and self._may_end(0) and token not in self._banned:
                return None
            if token in self._stops or token in self._banned or not self._matcher.push(token):
                return index
            self._num_tokens += 1
        self._next = self._allowed(0)
        return len(tokens) if self.is_over else None

    def _allowed(self, num_drafts: int) -> UInt32[np.ndarray, "words"]:
        """The tokens after what the matcher has read, which includes so many drafts."""
        found = np.zeros_like(self._vocabulary)
        given = self._matcher.allowed()[: len(found)]
        found[: len(given)] = given
        found &= self._ordinary
        return found | self._ends if self._may_end(num_drafts) else found

    def _may_end(self, num_drafts: int) -> bool:
        return self._num_tokens + num_drafts >= self._min_new_tokens and self._matcher.is_complete()
