"""Matchers of JSON schemas, regular expressions and Lark grammars over the tokens of a tokenizer, by llguidance."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import UInt32

from dspark_jax.pipelines.sampling.grammar import Grammar
from dspark_jax.pipelines.sampling.token_masks import WORD, has_token, words_of
from dspark_jax.pipelines.sampling.token_matcher import NewMatcher
from dspark_jax.pipelines.text.tokenizer import Tokenizer
from dspark_jax.speculators_common.errors import RequestError, install_hint

_SHOWN = 300  # characters of a message of llguidance


class GrammarMatcher:
    """A `TokenMatcher` of one text. The tokens that end a text for the tokenizer are none of the grammar's."""

    def __init__(self, matcher: Any, ends: UInt32[np.ndarray, "words"]) -> None:
        """`matcher` is an `llguidance.LLMatcher`, `ends` the mask of its tokens that end a text."""
        self._matcher, self._ends = matcher, ends

    def allowed(self) -> UInt32[np.ndarray, "words"]:
        """As in `TokenMatcher`. Nothing, if the text became too complex for the matcher."""
        if self._matcher.is_error():
            return np.zeros_like(self._ends)
        mask = np.frombuffer(self._matcher.compute_bitmask(), "<u4")  # may have a word more than the ids need
        return mask[: len(self._ends)].astype(np.uint32) & ~self._ends

    def is_complete(self) -> bool:
        """As in `TokenMatcher`."""
        return not self._matcher.is_error() and bool(self._matcher.is_accepting())

    def push(self, token: int) -> bool:
        """As in `TokenMatcher`."""
        is_end = token // WORD >= len(self._ends) or has_token(self._ends, token)
        return not is_end and bool(self._matcher.try_consume_tokens([token]) == 1)

    def pop(self, count: int) -> None:
        """As in `TokenMatcher`."""
        if count:
            self._matcher.rollback(count)


def grammar_matcher(grammar: Grammar, tokenizer: Tokenizer | None, *, vocab_size: int, source: str) -> NewMatcher:
    """Makes matchers of `grammar`; it is compiled once, here. `vocab_size` is the model's, `source` the model.

    Raises `RequestError` if llguidance is not installed, without a tokenizer or with one that llguidance does not read,
    and for a grammar that it does not understand or that no text matches.
    """
    if importlib.util.find_spec("llguidance") is None:
        hint = install_hint("llguidance", "grammar")
        raise RequestError(f"llguidance is not installed: {hint}", field="grammar", found=grammar.text)
    if tokenizer is None:
        raise RequestError(field="grammar", found=grammar.text, allowed=f"only with a tokenizer, and {source} has none")
    from llguidance import LLMatcher

    backend = tokenizer.backend
    known = _known_tokens(backend, max(vocab_size, tokenizer.vocab_size), tokenizer.eos_id, tokenizer.source)
    try:
        if grammar.kind == "json_schema":
            rules = LLMatcher.grammar_from_json_schema(grammar.text)
        elif grammar.kind == "regex":
            rules = LLMatcher.grammar_from_regex(grammar.text)
        else:
            rules = LLMatcher.grammar_from_lark(grammar.text)
    except ValueError as error:
        raise _refused(grammar, str(error)) from error
    compiled = LLMatcher(known, rules, log_level=0)
    if compiled.is_error():
        raise _refused(grammar, compiled.get_error())
    ends = words_of(known.eos_tokens, known.vocab_size)
    return lambda: GrammarMatcher(compiled.deep_copy(), ends)


@functools.lru_cache(maxsize=4)
def _known_tokens(backend: tokenizers.Tokenizer, vocab_size: int, eos_id: int | None, source: str) -> Any:
    """The tokenizer as llguidance knows it, an `LLTokenizer`. It takes a moment, so it is kept."""
    from llguidance import LLTokenizer

    try:
        return LLTokenizer(backend.to_str(), n_vocab=vocab_size, eos_token=eos_id)
    except ValueError as error:
        raise RequestError(
            f"llguidance cannot read this tokenizer: {_one_line(str(error))}", file=source, field="grammar"
        ) from error


def _refused(grammar: Grammar, why: str) -> RequestError:
    return RequestError(
        f"found a {grammar.kind} that llguidance refuses: {_one_line(why)}",
        field="grammar",
        found=grammar.text,
        allowed=f"a {grammar.kind} that llguidance understands",
    )


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."
