"""Anchors of token sequences as one rectangular training batch, on the host. Here is decided what a block may see in
training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int32

from dspark_jax.speculators_common.errors import RequestError


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRows:
    """What `CompactDraft.forward_train` and the loss need of `A` anchors; context is left-padded to `L` rows."""

    context_taps: Float[np.ndarray, "A L mH"]
    context_mask: Bool[np.ndarray, "A L"]
    previous: Int32[np.ndarray, "A W"]  # tokens at t .. t+W-1; column 0 is the anchor
    labels: Int32[np.ndarray, "A W"]  # tokens at t+1 .. t+W
    # The target's final-normed states at t .. t+W-1, which predict the labels. Never an input of the draft.
    target_hidden: Float[np.ndarray, "A W H"]


def anchor_positions(length: int, first: int, block_size: int) -> range:
    """Positions from `first` on that can be anchors of a sequence of `length` tokens: `block_size` true tokens must
    follow.
    """
    return range(first, length - block_size)


def training_rows(
    ids: Sequence[Int32[np.ndarray, "_"]],
    taps: Sequence[Float[np.ndarray, "_ mH"]],
    anchors: Sequence[tuple[int, int]],
    *,
    hidden_size: int,
    block_size: int,
    max_context: int,
) -> TrainingRows:
    """The batch of `anchors`, pairs of (sequence, position t).

    The context of an anchor is the most recent `max_context` rows **strictly before** t: in decoding the target has not
    processed the anchor, and its final-normed state would give the label of slot 0 away. The last `hidden_size` columns
    of `taps` are the final-normed states. Raises a `RequestError` for an anchor without `block_size` tokens after it.
    """
    width = block_size
    rows = TrainingRows(
        context_taps=np.zeros((len(anchors), max_context, taps[0].shape[1]), np.float32),
        context_mask=np.zeros((len(anchors), max_context), bool),
        previous=np.zeros((len(anchors), width), np.int32),
        labels=np.zeros((len(anchors), width), np.int32),
        target_hidden=np.zeros((len(anchors), width, hidden_size), np.float32),
    )
    for row, (sequence, t) in enumerate(anchors):
        if t not in anchor_positions(len(ids[sequence]), 0, width):
            raise RequestError(
                f"anchor {t} of sequence {sequence}: found {len(ids[sequence]) - 1 - t} tokens after it, allowed "
                f"{width} or more"
            )
        context = taps[sequence][max(0, t - max_context) : t]
        rows.context_taps[row, max_context - len(context) :] = context
        rows.context_mask[row, max_context - len(context) :] = True
        rows.previous[row] = ids[sequence][t : t + width]
        rows.labels[row] = ids[sequence][t + 1 : t + 1 + width]
        rows.target_hidden[row] = taps[sequence][t : t + width, -hidden_size:]
    return rows
