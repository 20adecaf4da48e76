"""The sampling controls of every row as arrays, and how a request becomes one row of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

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
    return _on_device(_one_row(generation, seed_words, prompt_length, num_biased_ids), 1)


def neutral_controls(num_rows: int, num_biased_ids: int) -> Controls:
    """Controls that change nothing. Each leaf is a separate buffer, which donation needs."""
    return _on_device(_one_row(Generation(), np.zeros((2,), np.uint32), 0, num_biased_ids), num_rows)


def _one_row(generation: Generation, seed_words: np.ndarray, prompt_length: int, num_biased_ids: int) -> dict[str, Any]:
    """The fields of `Controls` for one row, without the row axis."""
    biases = {**dict(generation.logit_bias), **dict.fromkeys(generation.banned_ids, -np.inf)}
    unused = num_biased_ids - len(biases)
    return {
        "seed": np.asarray(seed_words, np.uint32),
        "temperature": np.float32(generation.temperature),
        "top_k": np.int32(generation.top_k),
        "top_p": np.float32(generation.top_p),
        "min_p": np.float32(generation.min_p),
        "repetition_penalty": np.float32(generation.repetition_penalty),
        "presence_penalty": np.float32(generation.presence_penalty),
        "frequency_penalty": np.float32(generation.frequency_penalty),
        "bias_ids": np.asarray([*biases, *[UNUSED_ID] * unused], np.int32),
        "bias": np.asarray([*biases.values(), *[0.0] * unused], np.float32),
        "prompt_length": np.int32(prompt_length),
        "stop_from": np.int32(prompt_length + generation.min_new_tokens),
    }


def _on_device(one_row: Mapping[str, Any], num_rows: int) -> Controls:
    return Controls(**{name: jnp.asarray(np.stack([value] * num_rows)) for name, value in one_row.items()})
