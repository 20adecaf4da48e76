"""Streamed text: no piece ends inside a character, and the pieces together are the decoding of all ids."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from dspark_jax.pipelines.text.stream_decoder import StreamDecoder
from dspark_jax.pipelines.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizer import END, WORDS, backend, byte_ids


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(backend=backend(), source="made up")


@pytest.mark.parametrize("text", ["a😀b", "日本", "naïve", "👩‍🚀", "hello 😀"])
def test_split_character_is_held_back_until_it_is_whole(tokenizer: Tokenizer, text: str) -> None:
    stream = tokenizer.stream_decoder()
    pieces = [stream.push([token]) for token in byte_ids(text)]
    assert len(pieces) == len(text.encode())
    assert "".join(pieces) == text
    assert [piece for piece in pieces if piece] == list(text)
    assert stream.finish() == ""


def test_ids_of_one_round_may_be_pushed_together(tokenizer: Tokenizer) -> None:
    ids = byte_ids("a😀b")
    stream = tokenizer.stream_decoder()
    assert [stream.push(ids[:3]), stream.push(ids[3:]), stream.finish()] == ["a", "😀b", ""]


def test_end_in_the_middle_of_a_character_is_a_replacement_character_as_in_decode(tokenizer: Tokenizer) -> None:
    ids = byte_ids("a😀")[:-1]
    stream = tokenizer.stream_decoder()
    assert stream.push(ids) == "a"
    assert stream.finish() == "\ufffd" == tokenizer.decode(ids)[1:]


def test_special_tokens_are_left_out_of_the_stream_or_shown(tokenizer: Tokenizer) -> None:
    ids = [WORDS.index("hello"), END, WORDS.index("Ġhello")]
    assert tokenizer.stream_decoder().push(ids) == "hello hello"
    assert tokenizer.stream_decoder(skip_special=False).push(ids) == "hello<|im_end|> hello"


@given(
    ids=st.lists(st.integers(0, len(WORDS) - 1), max_size=24),
    text=st.text(max_size=6),
    cut=st.integers(0, 24),
    skip_special=st.booleans(),
)
def test_streamed_pieces_join_to_the_whole_decoding(ids: list[int], text: str, cut: int, skip_special: bool) -> None:
    made = backend()
    ids = [*ids[:cut], *(byte_ids(text) if text else []), *ids[cut:]]
    stream = StreamDecoder(lambda some: made.decode(list(some), skip_special_tokens=skip_special))
    assert stream.push(ids[:cut]) + stream.push(ids[cut:]) + stream.finish() == made.decode(
        ids, skip_special_tokens=skip_special
    )


def test_blank_before_a_word_survives_at_piece_borders() -> None:
    vocab = {"▁hello": 0, "▁world": 1, "<0xF0>": 2, "<0x9F>": 3, "<0x98>": 4, "<0x80>": 5, "</s>": 6, "<unk>": 7}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    made.add_special_tokens(["</s>"])
    stream = Tokenizer(backend=made, source="made up").stream_decoder()
    assert [stream.push([token]) for token in (0, 1, 6, 1, 2, 3, 4, 5, 0)] == [
        "hello",
        " world",
        "",
        " world",
        "",
        "",
        "",
        "😀",
        " hello",
    ]
