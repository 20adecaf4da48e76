"""The sampling controls of every row as arrays, and how a request becomes one row of them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, UInt32

from dspark_jax.pipelines.sampling.generation import Generation

UNUSED_ID = 2**31 - 1  # beyond every vocabulary: a scatter with mode "drop" ignores it


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Controls:
    """Per row, what `Generation` states. The neutral value of each control changes nothing."""

    seed: UInt32[Array, "B words"]  # two words
    temperature: Float[Array, "B"]  # 0 = the most probable token
    top_k: Int32[Array, "B"]  # 0 = off
    top_p: Float[Array, "B"]  # 1 = off
    min_p: Float[Array, "B"]  # 0 = off
    repetition_penalty: Float[Array, "B"]  # 1 = off
    presence_penalty: Float[Array, "B"]  # 0 = off
    frequency_penalty: Float[Array, "B"]  # 0 = off
    bias_ids: Int32[Array, "B n"]  # UNUSED_ID where unused
    bias: Float[Array, "B n"]  # added to the logits of `bias_ids`; -inf for banned ids
    prompt_length: Int32[Array, "B"]  # positions before it are the prompt
    stop_from: Int32[Array, "B"]  # no stop token is chosen for a position before it

    def of_rows(self, rows: Int32[Array, "T"]) -> Controls:
        """The controls of the row of each flat token."""
        picked: Controls = jax.tree.map(lambda leaf: leaf[rows], self)
        return picked


def request_controls(
    generation: Generation, seed_words: np.ndarray, prompt_length: int, num_biased_ids: int
) -> Controls:
    """The controls of one request, with B = 1. `seed_words` as in `Request.seed_words`; `num_biased_ids` is the length
    of `Controls.bias_ids`.
    """
    biases = {**dict(generation.logit_bias), **dict.fromkeys(generation.banned_ids, -np.inf)}
    unused = num_biased_ids - len(biases)

    def number(*values: float) -> Float[Array, "..."]:
        return jnp.asarray(np.asarray(values, np.float32))

    def integer(*values: int) -> Int32[Array, "..."]:
        return jnp.asarray(np.asarray(values, np.int32))

    return Controls(
        seed=jnp.asarray(np.asarray(seed_words, np.uint32)[None]),
        temperature=number(generation.temperature),
        top_k=integer(generation.top_k),
        top_p=number(generation.top_p),
        min_p=number(generation.min_p),
        repetition_penalty=number(generation.repetition_penalty),
        presence_penalty=number(generation.presence_penalty),
        frequency_penalty=number(generation.frequency_penalty),
        bias_ids=integer(*biases, *[UNUSED_ID] * unused)[None],
        bias=number(*biases.values(), *[0.0] * unused)[None],
        prompt_length=integer(prompt_length),
        stop_from=integer(prompt_length + generation.min_new_tokens),
    )


def neutral_controls(num_rows: int, num_biased_ids: int) -> Controls:
    """Controls that change nothing. Each leaf is a separate buffer, which donation needs."""
    one = request_controls(Generation(), np.zeros((2,), np.uint32), 0, num_biased_ids)
    neutral: Controls = jax.tree.map(lambda leaf: jnp.asarray(np.repeat(np.asarray(leaf), num_rows, axis=0)), one)
    return neutral
