"""Byte-fallback tokenizers: an incomplete character leaves complete ones as they are, and streamed pieces join to the
whole text.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.pipelines.text.byte_fallback import has_byte_fallback, without_cut_characters
from dspark_jax.pipelines.text.tokenizer import Tokenizer
from tests.support import tiny_tokenizer
from tests.support.tiny_tokenizer import BYTE_WORDS, FALLBACK_DECODERS, byte_fallback_backend, fallback_ids

CUT = "\N{REPLACEMENT CHARACTER}"
HELLO, BLANK, END = BYTE_WORDS.index("▁hello"), BYTE_WORDS.index("▁"), BYTE_WORDS.index("</s>")
TOKENIZERS = {
    **{style: Tokenizer(backend=byte_fallback_backend(style), source=style) for style in FALLBACK_DECODERS},
    "byte level": Tokenizer(backend=tiny_tokenizer.backend(), source="byte level"),
}
styles = pytest.mark.parametrize("style", FALLBACK_DECODERS)


@styles
def test_whole_characters_survive_beside_a_cut_one(style: str) -> None:
    tokenizer = TOKENIZERS[style]
    assert tokenizer.decode([HELLO, *fallback_ids("日本語".encode()[:-1])]).strip() == f"hello日本{CUT}{CUT}"
    assert tokenizer.decode(fallback_ids(b"\xff" + "é".encode() + b"\xe2" + "a😀".encode())) == f"{CUT}é{CUT}a😀"
    assert tokenizer.decode([*fallback_ids(b"\xe2"), HELLO, *fallback_ids(b"\x82\xac")]) == f"{CUT} hello{CUT}{CUT}"


@styles
def test_a_skipped_special_token_does_not_part_a_character(style: str) -> None:
    ids = fallback_ids("é€".encode())
    tokenizer = TOKENIZERS[style]
    assert tokenizer.decode([*ids[:3], END, *ids[3:]]) == "é€"
    assert tokenizer.decode([*ids[:3], END, *ids[3:]], skip_special=False) == f"é{CUT}</s>{CUT}{CUT}"


@styles
def test_a_cut_character_is_held_back_and_the_whole_one_before_it_is_not(style: str) -> None:
    stream = TOKENIZERS[style].stream_decoder()
    pieces = [stream.push([token]) for token in fallback_ids("é€".encode()[:-1])]
    assert pieces == ["", "é", "", ""]
    assert stream.finish() == CUT + CUT


@styles
@given(
    ids=st.lists(st.integers(0, len(BYTE_WORDS) - 1), max_size=12),
    text=st.text(max_size=4),
    cut=st.integers(0, 12),
)
def test_what_the_library_decodes_without_loss_is_decoded_as_it_does(
    style: str, ids: list[int], text: str, cut: int
) -> None:
    tokenizer = TOKENIZERS[style]
    words = [token for token in ids if not BYTE_WORDS[token].startswith("<0x")]
    whole = [*words[:cut], *fallback_ids(text.encode()), *words[cut:]]
    assert tokenizer.decode(whole) == tokenizer.backend.decode(whole)
    assert tokenizer.decode(whole, skip_special=False) == tokenizer.backend.decode(whole, skip_special_tokens=False)


@styles
@given(text=st.text(min_size=1, max_size=6), length=st.integers(1, 24))
def test_a_text_cut_anywhere_keeps_its_whole_characters(style: str, text: str, length: int) -> None:
    data = text.replace(" ", "_").encode()[:length]
    whole = data.decode(errors="ignore")
    lost = len(data) - len(whole.encode())
    assert TOKENIZERS[style].decode(fallback_ids(data)) == whole + CUT * lost


@pytest.mark.parametrize("style", TOKENIZERS)
@given(data=st.data(), skip_special=st.booleans())
def test_streamed_pieces_join_to_the_whole_text(style: str, data: st.DataObject, skip_special: bool) -> None:
    tokenizer = TOKENIZERS[style]
    # Half of the tokens are parts of characters: bytes drawn evenly from all tokens hardly ever make one.
    parts = "é€😀"
    some = fallback_ids(parts.encode()) if style != "byte level" else tiny_tokenizer.byte_ids(parts)
    token = st.one_of(st.integers(0, tokenizer.vocab_size), st.sampled_from(some))
    ids = data.draw(st.lists(token, max_size=24))
    border = data.draw(st.integers(0, 24))
    stream = tokenizer.stream_decoder(skip_special)
    pieces = [stream.push([token]) for token in ids[:border]] + [stream.push(ids[border:]), stream.finish()]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special)


def test_only_byte_fallback_tokenizers_are_treated_so() -> None:
    assert all(has_byte_fallback(byte_fallback_backend(style)) for style in FALLBACK_DECODERS)
    assert not has_byte_fallback(tiny_tokenizer.backend())
    assert without_cut_characters(["<0xC3>", "<0xa9>", "<0xE2>", "x", "<0x1>"]) == [
        "<0xC3>",
        "<0xa9>",
        CUT,
        "x",
        "<0x1>",
    ]
