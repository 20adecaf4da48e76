"""Drafting without a paged cache: the caller keeps the context K/V of every row in dense arrays."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from dspark_jax.architectures.nn.attention.block_context import ContextKV, DenseContext
from dspark_jax.speculators_common.numerics.platform import SoftmaxForm


class DraftRows(NamedTuple):
    """The result of drafting one block per row. The proposal of row b is `tokens[b, :lengths[b]]`."""

    tokens: Int32[Array, "B D"]  # target ids
    confidences: Float[Array, "B D"]  # probabilities; ones if there is no confidence head
    lengths: Int32[Array, "B"]  # number of proposed tokens
    base_logits: Float[Array, "B D Vd"]  # before the Markov bias


def dense_context(context_kv: ContextKV, lengths: Int32[Array, "B"], softmax: SoftmaxForm) -> DenseContext:
    """The context of a block from dense K/V at positions `0..L-1`, of which row b sees the first `lengths[b]`."""
    positions = jnp.arange(context_kv[0][0].shape[2], dtype=jnp.int32)[None]
    return DenseContext(keys_values=context_kv, positions=positions, lengths=lengths, softmax=softmax)
