"""Checks of what a request asks for. Every fault is one `RequestError` that names the field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from dspark_jax.pipelines.sampling.generation import MOST_LOGPROBS, Generation
from dspark_jax.pipelines.sampling.grammar import GRAMMAR_KINDS, Grammar
from dspark_jax.speculators_common.errors import RequestError
from dspark_jax.speculators_common.scalars import is_integer, is_number

_LARGEST = 1e6  # of a penalty or a bias: far beyond any logit, and sums of them stay finite
_MOST_TOKENS = 2**30
_SEEDS = 2**64


class _Rule(NamedTuple):
    is_right: Callable[[Any], bool]
    allowed: str


def _integer(least: int, most: int, allowed: str) -> _Rule:
    return _Rule(lambda value: is_integer(value) and least <= value <= most, allowed)


def _number(least: float, most: float, allowed: str, *, above: bool = False) -> _Rule:
    def is_right(value: Any) -> bool:
        return is_number(value) and (value > least if above else value >= least) and value <= most

    return _Rule(is_right, allowed)


def _optional(rule: _Rule) -> _Rule:
    return _Rule(lambda value: value is None or rule.is_right(value), rule.allowed)


# NaN fails every comparison, and infinity is above every limit.
_RULES = {
    "max_new_tokens": _integer(1, _MOST_TOKENS, "1 or more"),
    "min_new_tokens": _integer(0, _MOST_TOKENS, "0 or more"),
    "confidence_threshold": _number(0, 1, "0..1"),
    "temperature": _number(0, 100, "0..100; 0 is greedy"),
    "top_k": _integer(0, _MOST_TOKENS, "0 or more; 0 is off"),
    "top_p": _number(0, 1, "above 0, at most 1; 1 is off", above=True),
    "min_p": _number(0, 1, "0..1; 0 is off"),
    "repetition_penalty": _number(1 / _LARGEST, _LARGEST, f"{1 / _LARGEST:g}..{_LARGEST:g}; 1 is off"),
    "presence_penalty": _number(-_LARGEST, _LARGEST, "a finite number; 0 is off"),
    "frequency_penalty": _number(-_LARGEST, _LARGEST, "a finite number; 0 is off"),
    "seed": _optional(_integer(0, _SEEDS - 1, "an integer from 0 to 2^64 - 1")),
    "num_logprobs": _optional(_integer(0, MOST_LOGPROBS, f"0..{MOST_LOGPROBS}")),
}


def check_generation(generation: Generation, *, vocab_size: int, most_stop_ids: int, most_biased_ids: int) -> None:
    """Raise `RequestError` for options that are out of range, whatever the prompt.

    `most_stop_ids` and `most_biased_ids` are the numbers of ids that a row has room for.
    """
    for field in _RULES:
        check_option(field, getattr(generation, field))
    check_option("stop_strings", generation.stop_strings)
    _check_grammar(generation.grammar)
    if generation.min_new_tokens > generation.max_new_tokens:
        raise RequestError(
            field="min_new_tokens",
            found=generation.min_new_tokens,
            allowed=f"at most max_new_tokens, {generation.max_new_tokens}",
        )
    stops = () if generation.stop_ids is None else generation.stop_ids
    check_ids("stop_ids", stops, vocab_size=vocab_size, most=most_stop_ids)
    check_ids("banned_ids", generation.banned_ids, vocab_size=vocab_size, most=most_biased_ids)
    biased = _biased_ids(generation.logit_bias)
    check_ids("logit_bias", biased, vocab_size=vocab_size, most=most_biased_ids)
    if len(set(biased)) < len(biased):
        raise RequestError(field="logit_bias", found=generation.logit_bias, allowed="each id once")
    ids = [*biased, *generation.banned_ids]
    if len(set(ids)) > most_biased_ids:
        raise RequestError(
            field="logit_bias", found=f"{len(set(ids))} ids with banned_ids", allowed=f"at most {most_biased_ids}"
        )
    _check_some_token_is_left(generation, vocab_size)


def check_option(field: str, value: Any) -> None:
    """Raise `RequestError` for a number that is out of range, and for stop strings that are none.

    Other fields are not checked here.
    """
    if field == "stop_strings":
        _check_stop_strings(value)
    if (rule := _RULES.get(field)) is not None and not rule.is_right(value):
        raise RequestError(field=field, found=value, allowed=rule.allowed)


def check_ids(field: str, ids: Any, *, vocab_size: int, most: int) -> None:
    """Raise `RequestError` for what is no list of ids, for more than `most` ids, and for ids beyond the vocabulary."""
    if not isinstance(ids, tuple | list):
        raise RequestError(field=field, found=ids, allowed="a list of token ids")
    if len(ids) > most:
        allowed = f"at most {most}"
        raise RequestError(f"found {len(ids)} ids, allowed {allowed}", field=field, found=ids, allowed=allowed)
    if any(not is_integer(token) or not 0 <= token < vocab_size for token in ids):
        raise RequestError(field=field, found=ids, allowed=f"ids 0..{vocab_size - 1}")


def _check_stop_strings(strings: Any) -> None:
    """A replacement character stands for bytes that are no text yet, so nobody can tell at once whether it is there."""
    is_list = isinstance(strings, tuple | list)
    if not is_list or not all(isinstance(string, str) and string and _is_text(string) for string in strings):
        raise RequestError(field="stop_strings", found=strings, allowed="texts of a character or more, without U+FFFD")


def _check_grammar(grammar: Any) -> None:
    if grammar is None:
        return
    is_right = isinstance(grammar, Grammar) and grammar.kind in GRAMMAR_KINDS and isinstance(grammar.text, str)
    if not is_right or not grammar.text.strip():
        raise RequestError(
            field="grammar", found=grammar, allowed=f"a `Grammar` of kind {', '.join(GRAMMAR_KINDS)} with a text"
        )


def _is_text(string: str) -> bool:
    return "\N{REPLACEMENT CHARACTER}" not in string and not any("\ud800" <= letter <= "\udfff" for letter in string)


def _biased_ids(biases: Any) -> list[Any]:
    """The ids of `logit_bias`, as they are. Raises `RequestError` for what is no list of pairs with a finite number."""
    is_list = isinstance(biases, tuple | list) and all(
        isinstance(pair, tuple | list) and len(pair) == 2 and is_number(pair[1]) and -_LARGEST <= pair[1] <= _LARGEST
        for pair in biases
    )
    if not is_list:
        raise RequestError(field="logit_bias", found=biases, allowed="pairs of a token id and a finite number")
    return [token for token, _ in biases]


def _check_some_token_is_left(generation: Generation, vocab_size: int) -> None:
    ruled_out = set(generation.banned_ids)
    if generation.min_new_tokens:
        ruled_out |= set(generation.stop_ids or ())
    if len(ruled_out) >= vocab_size:
        raise RequestError(field="banned_ids", found=f"all {vocab_size} ids", allowed="fewer than the vocabulary has")
