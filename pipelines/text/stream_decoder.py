"""Token ids to text while they arrive: what is given out is final and never ends inside a character."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class StreamDecoder:
    """Turns ids into text piece by piece; the pieces joined are the text that `decode` gives for all ids together.

    A token's text depends on its neighbours (bytes of one character, the blank before a word), so a token is decoded
    together with those of the piece before it, and only the text that is new is given out. Text that ends in a
    replacement character may be half a character and waits for the next token.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._before: list[int] = []  # the ids of the last piece, already given out
        self._before_text = ""
        self._pending: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete; often one piece per id, `""` while a character is unfinished."""
        return "".join(self._push_one(token) for token in ids)

    def finish(self) -> str:
        """The rest of the text. A character that was never completed becomes replacement characters, as `decode` gives
        them.
        """
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
