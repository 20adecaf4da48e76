"""Make a rectangular training batch from anchors in token sequences, on the host.

This file decides what context a block sees in training. Axis letter `A`: the anchors of the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int32

from dspark_jax.speculators_common.errors import RequestError


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRows:
    """The inputs of `CompactDraft.forward_train` and of the loss for `A` anchors, each at a position t of its sequence.

    The context is padded on the left to `L` positions.
    """

    context_taps: Float[np.ndarray, "A L mH"]
    context_mask: Bool[np.ndarray, "A L"]  # false: padding
    previous: Int32[np.ndarray, "A W"]  # tokens at t .. t+W-1; column 0 is the anchor
    labels: Int32[np.ndarray, "A W"]  # tokens at t+1 .. t+W
    # The target's states after the final norm at t .. t+W-1, which predict the labels. The draft never gets them.
    target_hidden: Float[np.ndarray, "A W H"]


def anchor_positions(length: int, first: int, block_size: int) -> range:
    """The positions from `first` on that can be anchors in a sequence of `length` tokens.

    `block_size` tokens of the sequence must follow an anchor.
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
    """The training batch of `anchors`, which are pairs (index of the sequence, position t).

    `ids` and `taps` have one array per sequence. The last `hidden_size` columns of `taps` are the states after the
    target's final norm. The context of an anchor is the last `max_context` positions **strictly before** t. In decoding
    the target has not processed the anchor yet, and the anchor's state after the final norm would reveal the label of
    slot 0.

    Raises `RequestError` for an anchor without `block_size` tokens after it.
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
