"""Matchers of JSON schemas, regular expressions and Lark grammars over a tokenizer, and what is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_jax.pipelines.sampling.continuations import Continuations
from dspark_jax.pipelines.sampling.generation import Generation
from dspark_jax.pipelines.sampling.grammar import Grammar
from dspark_jax.pipelines.sampling.token_masks import has_token
from dspark_jax.pipelines.sampling.token_matcher import TokenMatcher
from dspark_jax.pipelines.text.grammar_matcher import grammar_matcher
from dspark_jax.pipelines.text.tokenizer import Tokenizer
from dspark_jax.speculators_common.errors import RequestError
from tests.support import tiny_tokenizer
from tests.support.tiny_tokenizer import BOS, END, START, WORDS, byte_ids

VOCAB = len(WORDS) + 9  # the model's vocabulary is padded
PAIR = Grammar.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
LIST = Grammar.lark('start: "[" item ("," item)* "]"\nitem: /[a-c]+/')


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer.loaded(tmp_path_factory.mktemp("tokenizer"), {"eos_token": "<|im_end|>"})


def _matcher(grammar: Grammar, tokenizer: Tokenizer | None) -> TokenMatcher:
    return grammar_matcher(grammar, tokenizer, vocab_size=VOCAB, source="the model")()


def _first_letters(mask: np.ndarray) -> set[str]:
    """The spellings of allowed tokens."""
    return {word for token, word in enumerate(WORDS) if has_token(mask, token)}


@pytest.mark.parametrize(
    ("grammar", "texts", "beginnings", "wrong"),
    [
        (Grammar.regex("(hello|help)!*"), ["hello", "help!!"], ["", "h", "hel"], ["x", "help?", "hello hello"]),
        (PAIR, ['{"a": 12}', '{"a":-3}'], ["", "{", '{"a": '], ["[", '{"b"', '{"a": x', '{"a": 1} x']),
        (LIST, ["[a]", "[abc,b]"], ["", "[", "[a,"], ["a", "[d", "[a,,"]),
    ],
    ids=["regex", "JSON schema", "Lark grammar"],
)
def test_a_matcher_follows_its_grammar(
    tokenizer: Tokenizer, grammar: Grammar, texts: list[str], beginnings: list[str], wrong: list[str]
) -> None:
    beginning = _matcher(grammar, tokenizer)
    for text, is_whole, is_right in (
        *((text, True, True) for text in texts),
        *((text, False, True) for text in beginnings),
        *((text, False, False) for text in wrong),
    ):
        for ids in (byte_ids(text), tokenizer.encode(text)[1:]):  # without BOS
            count, matcher = 0, beginning.copy()
            for token in ids:
                is_allowed = has_token(matcher.allowed(), token)
                assert matcher.push(token) == is_allowed
                if not is_allowed:
                    break
                count += 1
            assert (count == len(ids)) == is_right, text
            assert not is_right or matcher.is_complete() == is_whole
            assert not matcher.is_broken()


def test_special_tokens_and_tokens_beyond_the_vocabulary_match_nothing(tokenizer: Tokenizer) -> None:
    matcher = _matcher(Grammar.regex("(.|\n)*"), tokenizer)
    allowed = [token for token in range(VOCAB) if has_token(matcher.allowed(), token)]
    assert not {BOS, START, END, *range(len(WORDS), VOCAB)} & set(allowed)
    assert set(byte_ids("ab!")) < set(allowed)
    assert not any(matcher.push(token) for token in (BOS, START, END, VOCAB - 1))


@pytest.mark.parametrize("vocab_size", [32 * 10, 32 * 10 + 1, len(WORDS), len(WORDS) - 3])
def test_masks_have_the_length_of_any_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Also one that fills its last word, and one that is smaller than the tokenizer's."""
    matcher = grammar_matcher(Grammar.regex("(.|\n)*"), tokenizer, vocab_size=vocab_size, source="the model")()
    [mask] = Continuations(matcher, Generation(), vocab_size).masks(())
    allowed = [token for token in range(len(mask) * 32) if has_token(mask, token)]
    assert len(mask) == -(-vocab_size // 32)
    assert set(allowed) <= set(range(len(tiny_tokenizer.SPECIAL), min(vocab_size, len(WORDS))))
    assert {*byte_ids("azAZ09!"), vocab_size - 1} & set(range(len(WORDS) - 3)) <= set(allowed)


def test_copies_of_a_matcher_are_independent(tokenizer: Tokenizer) -> None:
    new = grammar_matcher(Grammar.regex("ab"), tokenizer, vocab_size=VOCAB, source="the model")
    one, other = new(), new()
    assert one.push(byte_ids("a")[0])
    assert _first_letters(one.allowed()) == {"b"}
    assert _first_letters(other.allowed()) == {"a"}


def test_stop_tokens_stand_where_the_text_is_complete(tokenizer: Tokenizer) -> None:
    """Also a stop token that is an ordinary one: it is none of the grammar's."""
    [a], [b] = byte_ids("a"), byte_ids("b")
    found = Continuations(_matcher(Grammar.regex("a[ab]*"), tokenizer), Generation(stop_ids=(END, b)), VOCAB)
    assert _first_letters(found.masks(())[0]) == {"a"}
    assert len(found.masks((a, END, a))) == 3  # nothing follows a stop token
    assert found.advance([a]) is None
    assert _first_letters(found.masks(())[0]) == {"a", "b", "<|im_end|>"}
    assert found.advance([END]) is None


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar.regex("a("), "grammar: found a regex that llguidance refuses: .*unclosed group"),
        (Grammar.lark("start: x"), 'grammar: found a lark that llguidance refuses: .*unknown name: "x"'),
        (Grammar.json_schema("[1"), "grammar: found a json_schema that llguidance refuses: "),
        (Grammar.json_schema({"type": "strin"}), "grammar: found a json_schema that llguidance refuses: .*strin"),
        (Grammar.json_schema("false"), "grammar: found a json_schema that llguidance refuses: Unsatisfiable schema"),
    ],
)
def test_a_grammar_that_is_not_understood_is_one_error(tokenizer: Tokenizer, grammar: Grammar, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        _matcher(grammar, tokenizer)
    assert "\n" not in str(caught.value)
    assert caught.value.found == grammar.text


def test_a_grammar_needs_a_tokenizer_that_can_be_read(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="grammar: found 'a', allowed only with a tokenizer, and the model has none"):
        _matcher(Grammar.regex("a"), None)
    made: dict[str, Any] = json.loads(tiny_tokenizer.backend().to_str())
    made["decoder"], made["pre_tokenizer"] = None, {"type": "Whitespace"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    with pytest.raises(RequestError, match=r"tokenizer.json: grammar: llguidance cannot read this tokenizer: "):
        _matcher(Grammar.regex("a"), Tokenizer.from_directory(tmp_path))


def test_without_the_package_the_error_says_what_to_install(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        RequestError, match=r"grammar: llguidance is not installed: pip install llguidance .*\[grammar\]"
    ):
        _matcher(Grammar.regex("a"), tokenizer)


@pytest.mark.parametrize("text", ["a{99999999}", "(((a{1000}){1000}){1000})"])
def test_a_matcher_that_reaches_a_limit_says_so(tokenizer: Tokenizer, text: str) -> None:
    found = Continuations(_matcher(Grammar.regex(text), tokenizer), Generation(), VOCAB)
    assert not found.is_over
    assert found.advance(byte_ids("aaa")) is not None
    assert (found.is_over, found.is_broken) == (True, True)


def test_a_copy_that_reaches_a_limit_spoils_no_other_matcher(tokenizer: Tokenizer) -> None:
    new = grammar_matcher(Grammar.regex("([abd]|cq{99999999}b)+"), tokenizer, vocab_size=VOCAB, source="the model")
    one, [a, b, c, q] = new(), byte_ids("abcq")
    assert one.push(a)
    tried = one.copy()
    assert tried.push(c)
    assert _first_letters(tried.allowed()) == {"q"}
    tried.push(q)
    tried.allowed()
    assert tried.is_broken()
    other = new()
    for matcher in (one, other):
        assert _first_letters(matcher.allowed()) == {"a", "b", "c", "d"}
        assert matcher.push(b)
        assert matcher.is_complete()
        assert not matcher.is_broken()
