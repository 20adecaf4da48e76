"""Decodes token ids as they arrive. The text it returns is final and never ends inside a character."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class StreamDecoder:
    """Turns ids into text piece by piece; the pieces joined are the text that `decode` gives for all ids together.

    The text of a token depends on its neighbours (bytes of one character, the blank before a word). So a token is
    decoded together with the tokens of the piece before it, and only the new text is returned. Text that ends in a
    replacement character may be an incomplete character and is held back until the next token.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._before: list[int] = []  # the ids of the last piece, whose text was returned
        self._before_text = ""
        self._pending: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete; empty while a character is incomplete."""
        return "".join(self._push_one(token) for token in ids)

    def certain_text(self) -> str:
        """The text before an incomplete character, of tokens that are held back."""
        text = self._decode(self._before + self._pending) if self._pending else self._before_text
        return text[len(self._before_text) :].rstrip(_REPLACEMENT)

    def finish(self) -> str:
        """The rest of the text. An incomplete character becomes replacement characters, as in `decode`."""
        text = self._decode(self._before + self._pending)[len(self._before_text) :] if self._pending else ""
        self._before, self._before_text, self._pending = [], "", []
        return text

    def _push_one(self, token: int) -> str:
        self._pending.append(token)
        text = self._decode(self._before + self._pending)
        if text.endswith(_REPLACEMENT) or len(text) <= len(self._before_text):
            return ""
        piece = text[len(self._before_text) :]
        self._before, self._pending = self._pending, []
        self._before_text = self._decode(self._before)
        return piece
