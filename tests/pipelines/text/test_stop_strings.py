"""Texts that end at a string: the same text and ids, however the tokens arrive, and nothing is shown too early."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from dspark_jax.pipelines.text.stop_strings import StoppedText, check_stop_strings
from dspark_jax.pipelines.text.tokenizer import Tokenizer
from dspark_jax.speculators_common.errors import RequestError
from tests.support.tiny_tokenizer import END, WORDS, backend, byte_fallback_backend, byte_ids, fallback_ids

HELLO = WORDS.index("hello")
TOKENIZER = Tokenizer(backend=backend(), source="made up")
FALLBACK = Tokenizer(backend=byte_fallback_backend(), source="made up")


def _read(
    ids: Sequence[int], strings: Sequence[str], *, size: int = 1, least: int = 0, tokenizer: Tokenizer = TOKENIZER
) -> tuple[list[str], int]:
    """The pieces that are shown after every `size` ids, and the number of ids that belong to the text."""
    text = StoppedText(tokenizer, strings, least)
    pieces = []
    for start in range(0, len(ids), size):
        end = text.push(ids[start : start + size])
        pieces.append(text.take())
        if end is not None:
            return [*pieces, text.finish()], start + end
    return [*pieces, text.finish()], len(ids)


@pytest.mark.parametrize("size", [1, 2, 3, 50])
@pytest.mark.parametrize(
    ("text", "strings", "shown", "count"),
    [
        ("abcdef", ("cd",), "ab", 4),
        ("abcdef", ("f",), "abcde", 6),
        ("abcdef", ("a",), "", 1),
        ("abcdef", ("abcdefg", "x"), "abcdef", 6),
        ("aabaaab", ("aaab",), "aab", 7),
        ("abcdef", ("cdef", "de"), "abc", 5),
        ("abcdef", ("cde", "e", "xe"), "ab", 5),
        ("a日本b", ("本",), "a日", 7),
        ("a日本b", ("日本b",), "a", 8),
        ("one\n\ntwo", ("\n\n",), "one", 5),
    ],
)
def test_the_text_ends_before_the_string_and_the_ids_with_it(
    size: int, text: str, strings: tuple[str, ...], shown: str, count: int
) -> None:
    pieces, num_ids = _read(byte_ids(text), strings, size=size)
    assert ("".join(pieces), num_ids) == (shown, count)


def test_a_string_may_be_inside_a_token() -> None:
    assert _read([HELLO, HELLO], ("ll",)) == (["he", ""], 1)
    assert _read([*byte_ids("a"), HELLO], ("ahe",)) == (["", "", ""], 2)


def test_what_may_begin_a_stop_string_is_held_back_until_it_is_decided() -> None:
    assert _read(byte_ids("xababd"), ("abac",))[0] == ["x", "", "", "", "ab", "abd", ""]
    assert _read(byte_ids("xaba"), ("abac",))[0] == ["x", "", "", "", "aba"]
    assert _read(byte_ids("xab"), ("bc", "abd"))[0] == ["x", "", "", "ab"]


def test_a_token_that_completes_a_string_ends_the_ids_even_if_it_begins_a_character() -> None:
    """The last token is "b" and the first byte of a character that later tokens would complete."""
    vocab = {word: index for index, word in enumerate([*WORDS, "bæ"])}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("b", "æ")]))
    made.decoder = decoders.ByteLevel()
    pieces, count = _read(
        [*byte_ids("a"), vocab["bæ"], *byte_ids("日")[1:]],
        ("b",),
        tokenizer=Tokenizer(backend=made, source="made up"),
    )
    assert ("".join(pieces), count) == ("a", 2)


def test_special_tokens_are_no_text() -> None:
    pieces, count = _read([*byte_ids("a"), END, *byte_ids("bc")], ("ab",))
    assert ("".join(pieces), count) == ("", 3)


def test_byte_fallback_tokens_complete_a_string() -> None:
    ids = fallback_ids("a日本b".encode())
    pieces, count = _read(ids, ("本",), tokenizer=FALLBACK)
    assert ("".join(pieces), count) == ("a日", 7)


def test_strings_within_the_least_number_of_tokens_are_text() -> None:
    assert _read(byte_ids("abab"), ("ab",), least=2) == (["", "ab", "", "", ""], 4)
    assert _read(byte_ids("abab"), ("ab",), least=1) == (["", "", ""], 2)
    assert _read(byte_ids("aaaa"), ("aa",), least=2) == (["", "a", "", ""], 3)
    assert _read(byte_ids("ab"), ("ab",), least=2) == (["", "ab", ""], 2)


@given(
    ids=st.lists(st.sampled_from([*byte_ids("ab日"), HELLO, END]), max_size=16),
    strings=st.lists(st.text("abhelo日", min_size=1, max_size=4), max_size=3),
    size=st.integers(1, 5),
    least=st.integers(0, 4),
)
def test_every_way_to_arrive_gives_the_same_and_the_first_string_ends_it(
    ids: list[int], strings: list[str], size: int, least: int
) -> None:
    pieces, count = _read(ids, strings, size=size, least=least)
    text = "".join(pieces)
    assert (text, count) == ("".join(_read(ids, strings, least=least)[0]), _read(ids, strings, least=least)[1])
    assert TOKENIZER.decode(ids[:count]).startswith(text)
    if count == len(ids) and text == TOKENIZER.decode(ids):
        assert least or not any(string in text for string in strings)
    elif not least:
        assert not any(string in TOKENIZER.decode(ids[: count - 1]) for string in strings)
        whole = TOKENIZER.decode(ids[:count])
        assert text == whole[: min(whole.find(string) for string in strings if string in whole)]


def test_strings_that_can_never_be_found_are_refused() -> None:
    check_stop_strings((), None, "model")
    check_stop_strings(("a", "<|im_"), TOKENIZER, "model")
    with pytest.raises(RequestError, match=r"stop_strings: found \('a',\), allowed only with a tokenizer, and model"):
        check_stop_strings(("a",), None, "model")
    with pytest.raises(
        RequestError, match=r"stop_strings: found '<\|im_end\|>\\n', allowed text without special tokens"
    ):
        check_stop_strings(("a", "<|im_end|>\n"), TOKENIZER, "model")
