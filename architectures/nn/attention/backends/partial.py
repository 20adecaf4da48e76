"""Softmax attention over a part of the keys, in the form that can be merged with other parts."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# Finite, so that a difference of two of them is 0 and not NaN.
NOTHING_SEEN = -1e30


class PartialAttention(NamedTuple):
    """The attention of every query over the keys of one part."""

    values: Float[Array, "B L N hd"]  # float32; 0 for a query that sees nothing
    log_sum: Float[Array, "B L N"]  # float32: the logarithm of the sum of the exponentials of the scores


def merged(parts: list[PartialAttention]) -> Float[Array, "B L N hd"]:
    """The attention over the union of disjoint parts, float32."""
    largest = functools.reduce(jnp.maximum, [part.log_sum for part in parts])
    weights = [jnp.exp(part.log_sum - largest)[..., None] for part in parts]
    weighted = [weight * part.values for weight, part in zip(weights, parts, strict=True)]
    return functools.reduce(jnp.add, weighted) / functools.reduce(jnp.add, weights)


def dense_attention(
    query: Float[Array, "B L N hd"],
    keys: Float[Array, "B S K hd"],
    values: Float[Array, "B S K hd"],
    visible: Bool[Array, "L S"],
    *,
    scale: float,
) -> PartialAttention:
    """Attention over a few keys of each row. `scale` multiplies the scores.

    Query head n reads key head `n // (N / K)`. Products take operands in the dtype of the keys; scores, softmax and
    sums are float32.
    """
    rows, length, num_heads, head_dim = query.shape
    kv_heads = keys.shape[2]
    grouped = query.astype(keys.dtype).reshape(rows, length, kv_heads, num_heads // kv_heads, head_dim)
    product = functools.partial(
        jnp.einsum, precision=exact_precision(keys), preferred_element_type=jnp.float32, optimize=False
    )
    scores = jnp.where(visible[:, None, None, :], product("blkgh,bskh->blkgs", grouped, keys) * scale, NOTHING_SEEN)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.where(visible[:, None, None, :], jnp.exp(scores - largest), 0.0)
    total = jnp.sum(weights, axis=-1)
    sums = product("blkgs,bskh->blkgh", weights.astype(values.dtype), values)
    is_empty = total == 0.0
    divisor = jnp.where(is_empty, 1.0, total)
    log_sum = jnp.where(is_empty, NOTHING_SEEN, largest[..., 0] + jnp.log(divisor))
    return PartialAttention(
        (sums / divisor[..., None]).reshape(rows, length, num_heads, head_dim),
        log_sum.reshape(rows, length, num_heads),
    )


def exact_precision(operand: Float[Array, "*axes"]) -> jax.lax.Precision | None:
    """The precision of a product. A TPU would round the operands of a float32 product to bfloat16 without it."""
    return jax.lax.Precision.HIGHEST if operand.dtype == jnp.float32 else None
