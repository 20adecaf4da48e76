"""Naive sampling by a random target: the whole text anew for every token, in float64, with sorted vocabularies. Only
the random numbers are the package's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from dspark_jax.pipelines.sampling.draws import Purpose, Uniforms
from dspark_jax.pipelines.sampling.generation import Generation, Request
from tests.support.random_pairs import next_logits

LANES = 64


Allowed = Callable[[Request, Sequence[int]], np.ndarray | None]
"""`allowed(request, output)`: whether each id may come next; `None` for every id."""


def sampled_texts(
    requests: Sequence[Request], allowed: Allowed = lambda request, output: None
) -> list[tuple[list[int], list[float]]]:
    """Output ids of every request, and their log-probabilities under the unchanged logits. A text also ends where
    nothing is allowed.
    """
    return [_text(request, allowed) for request in requests]


def _text(request: Request, allowed: Allowed) -> tuple[list[int], list[float]]:
    options, ids, logprobs = request.generation, list(request.prompt_ids), []
    seed = jnp.asarray(request.seed_words()[None])
    for _ in range(options.max_new_tokens):
        logits = next_logits(ids)
        processed = edited(logits, options, request.prompt_ids, ids[len(request.prompt_ids) :])
        if (mask := allowed(request, ids[len(request.prompt_ids) :])) is not None:
            if not mask.any():
                break
            processed[~mask] = -np.inf
        numbers = Uniforms(seed, jnp.asarray([len(ids)], jnp.int32)).pair(Purpose.TARGET_CHOICE)
        token = chosen(processed, options, np.asarray(numbers)[0])
        logprobs.append(float(logits[token] - np.logaddexp.reduce(logits)))
        ids.append(token)
        if token in request.stop_ids:
            break
    return ids[len(request.prompt_ids) :], logprobs


def edited(logits: np.ndarray, options: Generation, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """Biases, penalties and the least number of tokens, one token after the other."""
    logits = logits.astype(np.float64).copy()
    for token, bias in options.logit_bias:
        logits[token] += bias
    logits[list(options.banned_ids)] = -np.inf
    for token in range(len(logits)):
        if token in prompt or token in output:
            penalty = options.repetition_penalty
            logits[token] = logits[token] * penalty if logits[token] < 0 else logits[token] / penalty
        count = list(output).count(token)
        logits[token] -= options.frequency_penalty * count + options.presence_penalty * (count > 0)
    if len(output) < options.min_new_tokens:
        logits[list(options.stop_ids or ())] = -np.inf
    return logits


def filtered(logits: np.ndarray, options: Generation) -> np.ndarray:
    """Probabilities after temperature, top-k, top-p and min-p, with a sort for each, as transformers computes them."""
    scores = logits / options.temperature
    if options.top_k:
        scores[scores < np.sort(scores)[::-1][min(options.top_k, len(scores)) - 1]] = -np.inf
    if options.top_p < 1:
        order = np.argsort(scores)
        cumulative = np.cumsum(_softmax(scores)[order])
        removed = cumulative <= 1 - options.top_p
        removed[-1] = False
        scores[order[removed]] = -np.inf
    if options.min_p:
        probabilities = _softmax(scores)
        scores[probabilities < options.min_p * probabilities.max()] = -np.inf
    return _softmax(scores)


def chosen(logits: np.ndarray, options: Generation, numbers: np.ndarray) -> int:
    """The argmax at temperature 0, else a token by two numbers: its group `v % 64`, then its place in the group."""
    if not options.temperature:
        return int(logits.argmax())
    probabilities = filtered(logits.copy(), options)
    grouped = np.pad(probabilities, (0, -len(probabilities) % LANES)).reshape(-1, LANES)
    group = _by_number(grouped.sum(axis=0), numbers[0])
    return _by_number(grouped[:, group], numbers[1]) * LANES + group


def _by_number(weights: np.ndarray, number: float) -> int:
    return int(np.searchsorted(np.cumsum(weights) / weights.sum(), number, side="right"))


def _softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return np.asarray(weights / weights.sum())
