"""Masks of tokens as bits, one for each token that a round verifies, and the edit of logits that applies them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, UInt32

WORD = 32  # bits; token `id` is bit `id % 32` of word `id // 32`


class TokenMasks(NamedTuple):
    """What the host says about the next round, per row. Rows without a grammar allow every token and every draft."""

    words: UInt32[Array | np.ndarray, "B verified words"]  # tokens allowed after the anchor and after each draft
    lengths: Int32[Array | np.ndarray, "B"]  # drafts that may be verified; those after them leave the grammar


def token_masks(
    found: Mapping[int, tuple[np.ndarray, int]], *, num_rows: int, width: int, vocab_size: int
) -> TokenMasks:
    """Masks on the host, for rows that verify `width` tokens each, the anchor included.

    `found` maps rows with a grammar to their first masks and the number of drafts to verify. Further masks of these
    rows, and other rows, allow everything.
    """
    words = np.tile(full_words(vocab_size), (num_rows, width, 1))
    lengths = np.full((num_rows,), width - 1, np.int32)
    for row, (masks, length) in found.items():
        words[row, : len(masks)] = masks
        lengths[row] = length
    return TokenMasks(words, lengths)


def num_words(vocab_size: int) -> int:
    """Words that hold one bit for each token."""
    return -(-vocab_size // WORD)


def full_words(vocab_size: int) -> UInt32[np.ndarray, "words"]:
    """The mask of all tokens; bits beyond the vocabulary are zero."""
    bits = np.zeros((num_words(vocab_size) * WORD,), np.uint8)
    bits[:vocab_size] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def words_of(ids: Iterable[int], vocab_size: int) -> UInt32[np.ndarray, "words"]:
    """The mask of these tokens."""
    words = np.zeros((num_words(vocab_size),), np.uint32)
    for token in ids:
        words[token // WORD] |= np.uint32(1 << token % WORD)
    return words


def has_token(words: UInt32[np.ndarray, "words"], token: int) -> bool:
    """Whether a mask allows `token`."""
    return bool(words[token // WORD] >> np.uint32(token % WORD) & np.uint32(1))


def masked_logits(logits: Float[Array, "T V"], words: UInt32[Array, "T words"]) -> Float[Array, "T V"]:
    """The logits, -inf for tokens that the mask of their row does not allow."""
    bits = (words[:, :, None] >> jnp.arange(WORD, dtype=jnp.uint32)[None, None, :]) & 1
    is_allowed = bits.reshape(logits.shape[0], -1)[:, : logits.shape[1]] != 0
    return jnp.where(is_allowed, logits, -jnp.inf)
