"""Changes of logits before temperature and filters: biases, banned ids, penalties, a least number of tokens.

The order is that of transformers: biases, repetition penalty, least number of tokens. Presence and frequency penalties,
which transformers does not have, follow the repetition penalty.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from dspark_jax.pipelines.sampling.controls import UNUSED_ID, Controls


class TokenCounts(NamedTuple):
    """What the text before each chosen position holds, by token id."""

    in_text: Bool[Array, "T V"]  # in the prompt or the output
    in_output: Int32[Array, "T V"]  # how often in the output


def edited_logits(
    logits: Float[Array, "T V"],
    controls: Controls,
    counts: TokenCounts,
    positions: Int32[Array, "T"],
    stop_ids: Int32[Array, "T n"],
) -> Float[Array, "T V"]:
    """The logits with the changes that the row of each asks for.

    `controls` and `stop_ids` have one entry per logits row. `positions` are those of the tokens that are chosen.
    `stop_ids` are negative where unused.
    """
    index = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    logits = logits.at[index, controls.bias_ids].add(controls.bias, mode="drop")
    penalty = controls.repetition_penalty[:, None]
    logits = jnp.where(counts.in_text, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)
    logits = logits - controls.frequency_penalty[:, None] * counts.in_output.astype(jnp.float32)
    logits = jnp.where(counts.in_output > 0, logits - controls.presence_penalty[:, None], logits)
    is_early = (stop_ids >= 0) & (positions < controls.stop_from)[:, None]
    return logits.at[index, jnp.where(is_early, stop_ids, UNUSED_ID)].set(-jnp.inf, mode="drop")


def token_counts(
    history: Int32[Array, "B S"],
    controls: Controls,
    first: Int32[Array, "B"],
    rows: Int32[Array, "T"],
    positions: Int32[Array, "T"],
    *,
    width: int,
    vocab_size: int,
) -> TokenCounts:
    """The counts before each position that is chosen: drafts before a draft count, drafts after it do not.

    `history[b, s]` is the token of row b at position s, drafts included; `controls` has one entry per row. Logits row t
    belongs to `rows[t]` and chooses the token at `positions[t]`, one of `first[b] .. first[b] + width - 1`.
    """
    row = jnp.arange(history.shape[0], dtype=jnp.int32)[:, None]
    place = jnp.arange(history.shape[1], dtype=jnp.int32)[None, :]
    before = (place < first[:, None] - 1) & (history >= 0)
    is_output = place >= controls.prompt_length[:, None]
    empty = jnp.zeros((history.shape[0], vocab_size), jnp.int32)
    in_text = empty.at[row, jnp.where(before, history, UNUSED_ID)].max(1, mode="drop")[rows] > 0
    in_output = empty.at[row, jnp.where(before & is_output, history, UNUSED_ID)].add(1, mode="drop")[rows]
    ids = jnp.arange(vocab_size, dtype=jnp.int32)[None, :]
    for offset in range(width):
        at = first - 1 + offset
        token = jnp.take_along_axis(history, jnp.clip(at, 0, history.shape[1] - 1)[:, None], axis=1)[:, 0]
        is_before = (at[rows] >= 0) & (at[rows] < positions)
        is_same = (token[rows][:, None] == ids) & is_before[:, None]
        in_text |= is_same
        in_output += (is_same & (at >= controls.prompt_length)[rows][:, None]).astype(jnp.int32)
    return TokenCounts(in_text, in_output)
