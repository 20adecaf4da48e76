"""Changes of logits before temperature and filters: biases, banned ids, penalties, a least number of tokens.

The order is that of transformers: biases, repetition penalty, least number of tokens. Presence and frequency penalties,
which transformers does not have, follow the repetition penalty.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Shaped

from dspark_jax.pipelines.sampling.controls import UNUSED_ID, Controls


class Text(NamedTuple):
    """The text of every row, and where in it are the positions that are chosen now."""

    history: Int32[Array, "B S"]  # token at each position, drafts included; negative where there is none
    first: Int32[Array, "B"]  # the first chosen position of each row
    width: int  # the most positions that are chosen of one row: `first`, `first + 1`, ...
    rows: Int32[Array, "T"]  # the row of each logits row
    positions: Int32[Array, "T"]  # the position that each logits row chooses


def edited_logits(
    logits: Float[Array, "T V"], controls: Controls, text: Text, stop_ids: Int32[Array, "B n"]
) -> Float[Array, "T V"]:
    """The logits with the changes that their row asks for. A token counts for the positions after it, so drafts before
    a position count and later ones do not. `stop_ids` are negative where unused.
    """
    index = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    own = controls.of_rows(text.rows)
    biased = logits.at[index, own.bias_ids].add(own.bias, mode="drop")
    before = _counts(controls, text, logits.shape[1])
    penalised = _penalised(biased, own, _of_flat(before.in_text > 0, text), _of_flat(before.in_output, text))

    block = _block(controls, text, before)
    of_block = jnp.take_along_axis(biased, jnp.where(block.is_before, block.tokens, 0), axis=1)
    of_block = _penalised(of_block, own, block.is_before, block.in_output)
    penalised = penalised.at[index, jnp.where(block.is_before, block.tokens, UNUSED_ID)].set(of_block, mode="drop")

    stops = stop_ids[text.rows]
    is_early = (stops >= 0) & (text.positions < own.stop_from)[:, None]
    return penalised.at[index, jnp.where(is_early, stops, UNUSED_ID)].set(-jnp.inf, mode="drop")


def _penalised(
    logits: Float[Array, "T n"], controls: Controls, in_text: Bool[Array, "T n"], in_output: Int32[Array, "T n"]
) -> Float[Array, "T n"]:
    """Logits of tokens that are in the text or not, and so many times in the output."""
    penalty = controls.repetition_penalty[:, None]
    logits = jnp.where(in_text, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)
    logits = logits - controls.frequency_penalty[:, None] * in_output.astype(jnp.float32)
    return jnp.where(in_output > 0, logits - controls.presence_penalty[:, None], logits)


class _Counts(NamedTuple):
    """By row and token id, for the text before the tokens that this round verifies."""

    in_text: Int32[Array, "B V"]  # 1 if the token is in the prompt or the output
    in_output: Int32[Array, "B V"]  # how often the token is in the output


def _counts(controls: Controls, text: Text, vocab_size: int) -> _Counts:
    row = jnp.arange(text.history.shape[0], dtype=jnp.int32)[:, None]
    place = jnp.arange(text.history.shape[1], dtype=jnp.int32)[None, :]
    is_before = (place < text.first[:, None] - 1) & (text.history >= 0)
    is_output = is_before & (place >= controls.prompt_length[:, None])
    empty = jnp.zeros((text.history.shape[0], vocab_size), jnp.int32)
    return _Counts(
        in_text=empty.at[row, jnp.where(is_before, text.history, UNUSED_ID)].max(1, mode="drop"),
        in_output=empty.at[row, jnp.where(is_output, text.history, UNUSED_ID)].add(1, mode="drop"),
    )


class _Block(NamedTuple):
    """The tokens that this round verifies, the anchor first, for each logits row."""

    tokens: Int32[Array, "T width"]
    is_before: Bool[Array, "T width"]  # the token is before the position that the logits row chooses
    in_output: Int32[Array, "T width"]  # how often the token is in the output before that position


def _block(controls: Controls, text: Text, before: _Counts) -> _Block:
    place = text.first[:, None] - 1 + jnp.arange(text.width, dtype=jnp.int32)[None, :]
    inside = jnp.clip(place, 0, text.history.shape[1] - 1)
    tokens = jnp.maximum(jnp.take_along_axis(text.history, inside, axis=1), 0)[text.rows]
    is_before = (place[text.rows] >= 0) & (place[text.rows] < text.positions[:, None])
    is_output = is_before & (place >= controls.prompt_length[:, None])[text.rows]
    same = tokens[:, :, None] == tokens[:, None, :]
    in_block = jnp.sum(same & is_output[:, None, :], axis=2, dtype=jnp.int32)
    return _Block(tokens, is_before, before.in_output[text.rows[:, None], tokens] + in_block)


def _of_flat(of_rows: Shaped[Array, "B V"], text: Text) -> Shaped[Array, "T V"]:
    """The entry of its row for each logits row."""
    rows = text.first.shape[0]
    if text.rows.shape[0] == rows * text.width:  # all rows have the same width: a broadcast needs no copy
        spread = jnp.broadcast_to(of_rows[:, None], (rows, text.width, of_rows.shape[1]))
        return spread.reshape(-1, of_rows.shape[1])
    return of_rows[text.rows]
