"""Texts that end at a string: decodes token ids as they arrive, up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from dspark_jax.pipelines.text.tokenizer import Tokenizer
from dspark_jax.speculators_common.errors import RequestError


class StoppedText:
    """The text of one output. It ends before the first stop string, and its ids with the token that completes it.

    The text is searched after every token, so the end does not depend on how many tokens arrive together. If a token
    completes several strings, the text ends where the first of them begins. Strings that are complete within the first
    `min_new_tokens` tokens do not count. It is a `TextWatch`.
    """

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str] = (), min_new_tokens: int = 0) -> None:
        self._decoder = tokenizer.stream_decoder()
        self._strings, self._min_new_tokens = tuple(strings), min_new_tokens
        self._text = ""  # what the decoder returned
        self._num_tokens = 0
        self._num_searched = 0  # characters of the text before the newest token
        self._num_taken = 0
        self._is_complete = False

    def push(self, ids: Sequence[int]) -> int | None:
        """Add ids; returns how many of them belong to the text, if it ends within them."""
        for count, token in enumerate(ids, start=1):
            self._text += self._decoder.push([token])
            self._num_tokens += 1
            if self._strings and self._ends():
                return count
        return None

    def take(self) -> str:
        """The text that is new since the last call and certain: it cannot be the beginning of a stop string."""
        end = len(self._text) if self._is_complete else len(self._text) - self._num_doubtful()
        piece = self._text[self._num_taken : end]
        self._num_taken = max(end, self._num_taken)
        return piece

    def finish(self) -> str:
        """The rest of the text, after the last id."""
        if not self._is_complete:
            self._text, self._is_complete = self._text + self._decoder.finish(), True
        return self.take()

    def _ends(self) -> bool:
        """Search the text up to the newest token; if a stop string is complete, cut the text before it."""
        text = self._text + self._decoder.certain_text()
        starts = [text.find(string, max(self._num_searched - len(string) + 1, 0)) for string in self._strings]
        self._num_searched = len(text)
        found = [start for start in starts if start >= 0]
        if not found or self._num_tokens <= self._min_new_tokens:
            return False
        self._text, self._is_complete = text[: min(found)], True
        return True

    def _num_doubtful(self) -> int:
        """The length of the longest end of the text that is the beginning of a stop string."""
        sizes = range(max(map(len, self._strings), default=1) - 1, 0, -1)
        beginnings = ((size, string[:size]) for size in sizes for string in self._strings if len(string) > size)
        return next((size for size, beginning in beginnings if self._text.endswith(beginning)), 0)


def check_stop_strings(strings: Sequence[str], tokenizer: Tokenizer | None, source: str) -> None:
    """Raise `RequestError` for stop strings that can never be found: without a tokenizer, and special tokens, which
    text leaves out. `source` is the model.
    """
    if strings and tokenizer is None:
        raise RequestError(field="stop_strings", found=strings, allowed=f"only with a tokenizer, and {source} has none")
    for string in strings:
        special = [token for token in tokenizer.special_tokens if token and token in string] if tokenizer else []
        if special:
            raise RequestError(
                field="stop_strings",
                found=string,
                allowed=f"text without special tokens such as {special[0]}: state their ids as stop_ids",
            )
