"""Matchers of JSON schemas, regular expressions and Lark grammars over the tokens of a tokenizer, by llguidance."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
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


class _Family:
    """Matchers of llguidance that are copies of one another. They share what its limits count."""

    def __init__(self, fresh: Callable[[], Any]) -> None:
        """`fresh` makes an `llguidance.LLMatcher` that is not a copy, and has read nothing."""
        self.fresh, self.is_spoiled = fresh, False


class GrammarMatcher:
    """A `TokenMatcher` of one text. The tokens that end a text for the tokenizer are none of the grammar's.

    A matcher that reaches a limit of llguidance spoils all its copies, which then refuse what they should allow. So a
    draft that is only tried could end the text, or the text of another request. Whether a text is too complex must
    follow from its tokens alone: a matcher of a spoiled family is made anew and reads them again, and has given up if
    it alone reaches a limit.
    """

    def __init__(
        self, matcher: Any, family: _Family, ends: UInt32[np.ndarray, "words"], tokens: tuple[int, ...] = ()
    ) -> None:
        """`matcher` is an `llguidance.LLMatcher` that has read `tokens`, `ends` the mask of its tokens that end a
        text.
        """
        self._matcher, self._family, self._ends, self._tokens = matcher, family, ends, tokens
        self._is_broken = False

    def allowed(self) -> UInt32[np.ndarray, "words"]:
        """As in `TokenMatcher`."""
        found = self._answer(lambda matcher: matcher.compute_bitmask())
        if self._is_broken:
            return np.zeros_like(self._ends)
        mask = np.frombuffer(found, "<u4")  # may have a word more than the ids need
        return mask[: len(self._ends)].astype(np.uint32) & ~self._ends

    def is_complete(self) -> bool:
        """As in `TokenMatcher`."""
        is_accepting = self._answer(lambda matcher: matcher.is_accepting())
        return bool(is_accepting) and not self._is_broken

    def push(self, token: int) -> bool:
        """As in `TokenMatcher`."""
        if token // WORD >= len(self._ends) or has_token(self._ends, token):
            return False
        # A spoiled matcher may also refuse a token without an error. Refusals are rare, as masks are asked first.
        count = self._answer(lambda matcher: _consumed(matcher, token), is_sure=lambda found: found == 1)
        if self._is_broken or count != 1:
            return False
        self._tokens = (*self._tokens, token)
        return True

    def is_broken(self) -> bool:
        """As in `TokenMatcher`."""
        return self._is_broken

    def copy(self) -> GrammarMatcher:
        """As in `TokenMatcher`. It takes a microsecond; not every grammar has a rollback."""
        self._answer(lambda matcher: None)
        found = GrammarMatcher(self._matcher.deep_copy(), self._family, self._ends, self._tokens)
        found._is_broken = self._is_broken
        return found

    def _answer(self, ask: Callable[[Any], Any], is_sure: Callable[[Any], bool] = lambda found: True) -> Any:
        """What the matcher says; if its family is spoiled or the answer is not sure, what a new one says."""
        if self._is_broken:
            return None
        if not self._family.is_spoiled:
            found = ask(self._matcher)
            self._family.is_spoiled = bool(self._matcher.is_error())
            if not self._family.is_spoiled and is_sure(found):
                return found
        self._family = _Family(self._family.fresh)
        self._matcher = self._family.fresh()
        for token in self._tokens:
            _consumed(self._matcher, token)
        found = ask(self._matcher)
        self._is_broken = bool(self._matcher.is_error())
        return found


def _consumed(matcher: Any, token: int) -> int:
    """Read a token; returns 1 if it may come next. The mask before it counts towards the limits, so it is always made:
    whether a limit is reached must not depend on who asked for masks.
    """
    matcher.compute_bitmask()
    count: int = matcher.try_consume_tokens([token])
    return count


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

    family = _Family(lambda: LLMatcher(known, rules, log_level=0))
    compiled = family.fresh()
    if compiled.is_error():
        raise _refused(grammar, compiled.get_error())
    return GrammarMatcher(compiled, family, words_of(known.eos_tokens, known.vocab_size)).copy


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
