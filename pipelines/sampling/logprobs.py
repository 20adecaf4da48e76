"""Log-probabilities of emitted tokens. They are those of the model: of its logits before any control acts on them."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from dspark_jax.pipelines.sampling.candidates import in_falling_order, likely_candidates
from dspark_jax.pipelines.sampling.draws import row_sums
from dspark_jax.pipelines.sampling.generation import MOST_LOGPROBS


class Logprobs(NamedTuple):
    """Log-probabilities of tokens, and the most probable tokens of the same positions, in falling order."""

    chosen: Float[Array, "B N"]
    top_ids: Int32[Array, "B N top"]
    top: Float[Array, "B N top"]


def top_count(vocab_size: int) -> int:
    """The number of most probable tokens that a round reports, whatever the requests ask for."""
    return min(MOST_LOGPROBS, vocab_size)


def empty_logprobs(num_rows: int, length: int, num_top: int) -> Logprobs:
    """Log-probabilities of `length` tokens per row, to be filled."""
    return Logprobs(
        chosen=jnp.zeros((num_rows, length), jnp.float32),
        top_ids=jnp.zeros((num_rows, length, num_top), jnp.int32),
        top=jnp.zeros((num_rows, length, num_top), jnp.float32),
    )


def logprobs_of(logits: Float[Array, "T V"], index: Int32[Array, "B N"], tokens: Int32[Array, "B N"]) -> Logprobs:
    """The log-probabilities of `tokens[b, i]` under logits row `index[b, i]`. Negative tokens give arbitrary values."""
    largest = jnp.max(logits, axis=1, keepdims=True)
    total = largest[:, 0] + jnp.log(row_sums(jnp.exp(logits - jnp.where(jnp.isfinite(largest), largest, 0))))
    candidates = likely_candidates(logits, MOST_LOGPROBS)
    top, places = in_falling_order(candidates.values, top_count(logits.shape[1]))
    top_ids = jnp.take_along_axis(candidates.ids, places, axis=1)
    chosen = logits[index, jnp.maximum(tokens, 0)] - total[index]
    return Logprobs(chosen, top_ids[index], (top - total[:, None])[index])
