"""Byte-fallback tokenizers (SentencePiece style): they spell a character outside the vocabulary as one token such as
`<0xE2>` per UTF-8 byte.

Their decoder joins each run of byte tokens. If any part of the run is not valid UTF-8, it gives one replacement
character for every byte of the run, so an incomplete character would also lose the complete characters beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import tokenizers

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def has_byte_fallback(backend: tokenizers.Tokenizer) -> bool:
    """Whether the tokenizer's decoder turns byte tokens into characters."""
    return backend.decoder is not None and backend.decoder.decode(["<0x41>"]).strip() == "A"


def without_cut_characters(tokens: Sequence[str]) -> list[str]:
    """`tokens` with every byte token that belongs to no complete character replaced by a replacement character.

    The remaining byte tokens are valid UTF-8, so the tokenizer's decoder gives every complete character.
    """
    kept: list[str] = []
    run: list[str] = []
    for token in tokens:
        if _BYTE.fullmatch(token):
            run.append(token)
            continue
        kept += _mended(run)
        kept.append(token)
        run = []
    return kept + list(_mended(run))


def _mended(run: Sequence[str]) -> Iterator[str]:
    data = bytes(int(token[3:5], 16) for token in run)
    start = 0
    while start < len(data):
        try:
            data[start:].decode("utf-8")
            cut, after = len(data), len(data)
        except UnicodeDecodeError as error:
            cut, after = start + error.start, start + error.end
        yield from run[start:cut]
        yield from [_REPLACEMENT] * (after - cut)
        start = after
