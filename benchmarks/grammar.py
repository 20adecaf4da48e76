"""Texts of random JSON schemas and regular expressions by the demo pair: are they valid, and equal to those of plain
decoding, and what does the grammar do to tau?
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.pipelines.api import GenerationResult, Grammar, Pipeline, load
from dspark_jax.pipelines.sampling.generation import Generation, Request

DRAFT = Path(__file__).parents[1] / "models" / "smollm2-135m-dspark"
NAMES = ("name", "age", "city", "color", "price", "tags", "email", "active", "score", "country", "title", "id")
WORDS = ("red", "green", "blue", "Paris", "Rome", "low", "medium", "high", "yes", "no", "cat", "dog", "North", "South")
TOPICS = ("a person", "a city", "a book", "a car", "a recipe", "a planet", "a film", "an animal", "a song", "a shop")
# As `json.dumps` writes it. Free white space would let a small model write line ends until the budget is spent.
SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
REGEXES = (
    (r"[A-Z][a-z]{2,9}(, [A-Z][a-z]{2,9}){1,3}\.", "Name a few {words}."),
    (r"\d{4}-(0[1-9]|1[0-2])-\d{2}", "When did {topic} appear? Give a date."),
    (r"(yes|no), because [a-z ]{5,40}\.", "Is {topic} better than {other}?"),
    (r"https://[a-z]{3,12}\.(com|org|net)/[a-z0-9]{1,10}", "Give the web address of {topic}."),
    (r"\(\d{3}\) \d{3}-\d{4}", "Give the phone number of {topic}."),
    (r"([A-Za-z]+ ){3,7}[a-z]+[.!]", "Say something about {topic}."),
    (r"[a-z]{2,8}\.[a-z]{2,8}@[a-z]{3,10}\.com", "Give an email address for {topic}."),
    (r"(\d{1,2}, ){4,6}\d{1,2}", "Count to ten."),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """A prompt, the form that its answer must have, and a check of it that does not know the grammar's code."""

    prompt: str
    grammar: Grammar
    generation: Generation
    is_valid: Callable[[str], bool]


def random_items(count: int, seed: int, max_new_tokens: int) -> list[Item]:
    """Two in three are schemas of nested objects. Every second text is greedy, the others are drawn."""
    made = []
    for index in range(count):
        draw = random.Random(f"{seed} {index}")
        topic, other = draw.sample(TOPICS, 2)
        if index % 3 == 2:
            regex, prompt = draw.choice(REGEXES)
            prompt = prompt.format(topic=topic, other=other, words=f"words for {topic}")
            grammar, is_valid = Grammar.regex(regex), _matches(regex)
        else:
            schema = _object(draw, depth=2)
            grammar = Grammar.json_schema({**schema, "x-guidance": SPACES})
            names = ", ".join(schema["properties"])
            prompt, is_valid = f"Describe {topic} as JSON with the fields {names}.", _is_instance(schema)
        options = Generation(max_new_tokens=max_new_tokens, grammar=grammar)
        if index % 2:
            options = dataclasses.replace(options, temperature=0.8, top_p=0.95, seed=index)
        made.append(Item(prompt=prompt, grammar=grammar, generation=options, is_valid=is_valid))
    return made


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(NAMES, draw.randint(2, 4))
    return {
        "type": "object",
        "properties": {name: _value(draw, depth - 1) for name in names},
        "required": names if draw.random() < 0.7 else names[:1],
        "additionalProperties": False,
    }


def _value(draw: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["integer", "boolean", "string", "enum", *(["object", "array"] if depth else [])]
    kind = draw.choice(kinds)
    if kind == "integer":
        return {"type": "integer", "minimum": draw.randint(-5, 5), "maximum": draw.randint(6, 3000)}
    if kind == "string":
        return {"type": "string", "maxLength": draw.randint(4, 16)}
    if kind == "enum":
        return {"enum": draw.sample(WORDS, draw.randint(2, 5))}
    if kind == "array":
        return {"type": "array", "items": _value(draw, 0), "minItems": 1, "maxItems": draw.randint(1, 3)}
    return _object(draw, depth) if kind == "object" else {"type": "boolean"}


def _matches(regex: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(regex, text) is not None


def _is_instance(schema: dict[str, Any]) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        try:
            return _follows(json.loads(text), schema)
        except ValueError:
            return False

    return check


def _follows(value: Any, schema: dict[str, Any]) -> bool:
    """Whether the value is what the schema says, for the schemas that are made here."""
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema["type"]
    if kind == "object":
        fields = schema["properties"]
        is_complete = isinstance(value, dict) and set(schema["required"]) <= set(value) <= set(fields)
        return is_complete and all(_follows(one, fields[name]) for name, one in value.items())
    if kind == "array":
        is_list = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return is_list and all(_follows(one, schema["items"]) for one in value)
    if kind == "integer":
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return is_whole and schema["minimum"] <= value <= schema["maximum"]
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    return isinstance(value, bool)


def requests_of(pipeline: Pipeline, items: Sequence[Item]) -> list[Request]:
    """The requests of the items."""
    return [pipeline.requests(item.prompt, item.generation)[0] for item in items]


def _without_grammar(request: Request, result: GenerationResult) -> Request:
    """The request for as many tokens as its text with the grammar has, or a few more, without the grammar."""
    budget = max(len(result.output_ids), 16)
    generation = dataclasses.replace(request.generation, grammar=None, max_new_tokens=budget)
    return dataclasses.replace(request, generation=generation, new_matcher=None)


def results_of(pipeline: Pipeline, requests: Sequence[Request]) -> list[GenerationResult]:
    """Run the requests; the results in their order."""
    done = {piece.index: piece.result for piece in pipeline.run(requests) if piece.result is not None}
    return [done[index] for index in range(len(requests))]


def pooled_tau(results: Sequence[GenerationResult]) -> float:
    """Committed tokens per round, over all rounds of all texts."""
    rounds = [one for result in results for one in result.rounds]
    return sum(one.accepted + 1 for one in rounds) / len(rounds)


def mask_milliseconds(requests: Sequence[Request], results: Sequence[GenerationResult], drafts: int) -> float:
    """Median time of the masks of one round of one row, with the text's own tokens as drafts: the dearest case."""
    from dspark_jax.pipelines.sampling.continuations import Continuations

    times = []
    for request, result in zip(requests, results, strict=True):
        assert request.new_matcher is not None
        found = Continuations(request.new_matcher(), request.generation, 49_152)
        for place in range(0, len(result.output_ids), drafts + 1):
            started = time.perf_counter()
            found.masks(result.output_ids[place : place + drafts])
            times.append(time.perf_counter() - started)
            if found.advance(result.output_ids[place : place + drafts + 1]) is not None:
                break
    return float(np.median(times) * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="texts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()
    drafts = args.num_speculative_tokens
    items = random_items(args.count, args.seed, args.max_new_tokens)
    sizes: dict[str, Any] = {"max_seq_len": 192 + args.max_new_tokens, "batch_size": args.batch_size}
    pair = load("smollm2", DRAFT, dtype="float32", num_speculative_tokens=drafts, **sizes)
    requests = requests_of(pair, items)
    found = results_of(pair, requests)
    free = results_of(pair, list(map(_without_grammar, requests, found)))
    plain = results_of(pair.without_draft(), requests)

    equal = sum(one.output_ids == other.output_ids for one, other in zip(found, plain, strict=True))
    whole = [(item, one) for item, one in zip(items, found, strict=True) if one.finish_reason == "stop"]
    valid = sum(item.is_valid(one.text or "") for item, one in whole)
    print(f"{len(items)} texts, {sum(item.grammar.kind == 'json_schema' for item in items)} of them JSON, k = {drafts}")
    print(f"ids equal to plain decoding with the same grammar: {equal} of {len(items)}")
    print(f"ended before the budget of {args.max_new_tokens} tokens: {len(whole)}, of these valid: {valid}")
    valid_anyway = sum(item.is_valid(one.text or "") for item, one in zip(items, free, strict=True))
    print(f"valid without the grammar: {valid_anyway}")
    for name, picked in (
        ("all", range(len(items))),
        ("JSON", [index for index, item in enumerate(items) if item.grammar.kind == "json_schema"]),
        ("regex", [index for index, item in enumerate(items) if item.grammar.kind == "regex"]),
        ("greedy", [index for index, item in enumerate(items) if not item.generation.samples]),
        ("temperature 0.8", [index for index, item in enumerate(items) if item.generation.samples]),
    ):
        with_grammar, without = pooled_tau([found[i] for i in picked]), pooled_tau([free[i] for i in picked])
        print(f"tau, {name}: {with_grammar:.2f} with the grammar, {without:.2f} without")
    print(f"masks of a round of one row: {mask_milliseconds(requests, found, drafts):.2f} ms (median)")


if __name__ == "__main__":
    main()
