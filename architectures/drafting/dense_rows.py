"""Drafting without paged caches: the caller keeps dense context K/V, one line per row, and passes it."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from dspark_jax.architectures.nn.attention.block_context import ContextKV, DenseContext
from dspark_jax.speculators_common.numerics.platform import SoftmaxForm


class DraftRows(NamedTuple):
    """The result of one block per row: `tokens[b, :lengths[b]]` is the proposal of row b."""

    tokens: Int32[Array, "B D"]
    confidences: Float[Array, "B D"]  # sigmoid of the head's logits; ones without a head
    lengths: Int32[Array, "B"]
    base_logits: Float[Array, "B D Vd"]  # before the Markov bias


def dense_context(context_kv: ContextKV, lengths: Int32[Array, "B"], softmax: SoftmaxForm) -> DenseContext:
    """The context of a block from K/V `[B, K, L, hd]` at positions 0..L-1; row b sees the first `lengths[b]`."""
    positions = jnp.arange(context_kv[0][0].shape[2], dtype=jnp.int32)[None]
    return DenseContext(keys_values=context_kv, positions=positions, lengths=lengths, softmax=softmax)
