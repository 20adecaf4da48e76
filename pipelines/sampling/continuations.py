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
        self._next = self._allowed(matcher)

    @property
    def is_over(self) -> bool:
        """Whether no token may come next."""
        return not self._next.any()

    @property
    def is_broken(self) -> bool:
        """Whether the text became too complex for the matcher of its grammar. The text ends, and is not complete."""
        return self._matcher.is_broken()

    def masks(self, drafts: Sequence[int]) -> UInt32[np.ndarray, "rows words"]:
        """The tokens that may come next, and those after each draft, up to the first draft that may not stand there.

        One row more than there are drafts that may stand there. After a stop token nothing matters, and no further row
        follows.
        """
        tried = self._matcher.copy() if drafts else self._matcher
        rows = [self._next]
        for draft in drafts:
            if not has_token(rows[-1], draft):
                break
            if draft in self._stops:
                rows.append(self._vocabulary)
                break
            if not tried.push(draft):
                break
            rows.append(self._allowed(tried, num_drafts=len(rows)))
        return np.stack(rows)

    def advance(self, tokens: Sequence[int]) -> int | None:
        """Read emitted tokens. Returns how many of them belong to the text, if it ends within them or after them
        because nothing may follow; `None` otherwise, and after a stop token.

        A token that may not stand there is emitted where nothing may follow: it is no part of the text.
        """
        for index, token in enumerate(tokens):
            if token in self._stops and self._may_end(self._matcher) and token not in self._banned:
                return None
            if token in self._stops or token in self._banned or not self._matcher.push(token):
                self._next = self._allowed(self._matcher)  # a matcher may break only when it is asked
                return index
            self._num_tokens += 1
        self._next = self._allowed(self._matcher)
        return len(tokens) if self.is_over else None

    def _allowed(self, matcher: TokenMatcher, num_drafts: int = 0) -> UInt32[np.ndarray, "words"]:
        """The tokens after what `matcher` has read, which includes so many drafts."""
        found = np.zeros_like(self._vocabulary)
        given = matcher.allowed()[: len(found)]
        found[: len(given)] = given
        found &= self._ordinary
        return found | self._ends if self._may_end(matcher, num_drafts) else found

    def _may_end(self, matcher: TokenMatcher, num_drafts: int = 0) -> bool:
        return self._num_tokens + num_drafts >= self._min_new_tokens and matcher.is_complete()
