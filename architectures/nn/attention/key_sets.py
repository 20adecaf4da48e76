"""Softmax attention over the union of several sets of keys, in plain XLA. It is the reference for every backend."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dspark_jax.architectures.nn.attention.masks import block_mask
from dspark_jax.speculators_common.formats.draft_config import LayerMask, WindowOrigin
from dspark_jax.speculators_common.numerics.platform import SoftmaxForm

# Finite, so that the output of a query that sees no key (an inert token) is finite and not NaN.
_MASKED_SCORE = -1e30
# With one column the sum would be a matrix-vector product, and XLA:CPU's order of summation would depend on the number
# of rows.
_ONES_COLUMNS = 8


class KeySet(NamedTuple):
    """Keys and values of every row, and which of them each query sees.

    Keys and values are `[B, K, S, hd]` if `head_major`, otherwise `[B, S, K, hd]`. `L` counts the queries of a row.
    """

    keys: Float[Array, "B _ _ hd"]
    values: Float[Array, "B _ _ hd"]
    visible: Bool[Array, "B L S"]
    head_major: bool

    @property
    def num_heads(self) -> int:
        """K."""
        return self.keys.shape[1 if self.head_major else 2]

    @property
    def axes(self) -> str:
        """The einsum letters of the axes of keys and values."""
        return "bksh" if self.head_major else "bskh"


def block_key_set(
    block_keys: Float[Array, "B W K hd"],
    block_values: Float[Array, "B W K hd"],
    num_queries: int,
    mask: LayerMask,
    origin: WindowOrigin,
    *,
    like: KeySet,
) -> KeySet:
    """The keys and values of the block itself, with the slots that each of its first `num_queries` slots sees.

    The dtype and the order of the axes are those of `like`.
    """
    rows, num_slots = block_keys.shape[:2]
    seen = block_mask(num_slots, mask, origin)[None, :num_queries]
    keys, values = block_keys, block_values
    if like.head_major:
        keys, values = keys.swapaxes(1, 2), values.swapaxes(1, 2)
    visible = jnp.broadcast_to(seen, (rows, num_queries, num_slots))
    return KeySet(keys.astype(like.keys.dtype), values.astype(like.values.dtype), visible, like.head_major)


def attend(
    query: Float[Array, "B L N hd"], key_sets: list[KeySet], *, scale: float, softmax: SoftmaxForm
) -> Float[Array, "B L N hd"]:
    """Grouped-query attention over all key sets together: `softmax(scale * q k) v`.

    Query head n reads key head `n // (N / K)`. Products take operands in the dtype of the keys; scores, softmax and
    sums are float32. The result has the dtype of `query`.

    With `softmax="row_independent"` the output of a row is the same, bit for bit, for every number of rows. Without it,
    the last bit could depend on the number of rows, and plain and speculative decoding could choose different tokens
    where two logits are nearly equal. The cause is that XLA:CPU selects the exponential and the order of summation by
    the size of the reduced array. The softmax weights are therefore summed by a matrix product, in which rows do not
    influence each other.
    """
    rows, length, num_heads, head_dim = query.shape
    kv_heads = key_sets[0].num_heads
    group = num_heads // kv_heads
    dtype = key_sets[0].keys.dtype
    grouped = query.astype(dtype).transpose(0, 2, 1, 3).reshape(rows, kv_heads, group * length, head_dim)
    weights = _exponentials([_masked_scores(grouped, key_set, scale) for key_set in key_sets])
    out = jnp.zeros(grouped.shape, jnp.float32)
    total = jnp.zeros((*grouped.shape[:-1], 1), jnp.float32)
    for key_set, share in zip(key_sets, weights, strict=True):
        rounded = share.astype(key_set.values.dtype)
        out = out + jnp.einsum(
            f"bkqs,{key_set.axes}->bkqh", rounded, key_set.values, preferred_element_type=jnp.float32
        )
        if softmax == "row_independent":
            ones = jnp.ones((share.shape[-1], _ONES_COLUMNS), rounded.dtype)
            total = total + jnp.einsum("bkqs,so->bkqo", rounded, ones, preferred_element_type=jnp.float32)[..., :1]
        else:
            total = total + jnp.sum(share, axis=-1, keepdims=True)
    return (out / total).astype(query.dtype).reshape(rows, num_heads, length, head_dim).transpose(0, 2, 1, 3)


def _exponentials(scores: list[Float[Array, "B K GL _"]]) -> list[Float[Array, "B K GL _"]]:
    """`exp(score - largest score of the query over all sets)`.

    `jnp.where` does not change a finite maximum. It keeps XLA:CPU from fusing the maximum with the exponential: in the
    fused form the exponential is selected by the size of the array.
    """
    largest = functools.reduce(jnp.maximum, [jnp.max(part, axis=-1, keepdims=True) for part in scores])
    largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
    return [jnp.exp(part - largest) for part in scores]


def _masked_scores(grouped: Float[Array, "B K GL hd"], key_set: KeySet, scale: float) -> Float[Array, "B K GL S"]:
    rows, kv_heads, queries, _ = grouped.shape
    length, num_keys = key_set.visible.shape[1:]
    products = jnp.einsum(f"bkqh,{key_set.axes}->bkqs", grouped, key_set.keys, preferred_element_type=jnp.float32)
    scores = products * scale
    per_head = scores.reshape(rows, kv_heads, queries // length, length, num_keys)
    return jnp.where(key_set.visible[:, None, None], per_head, _MASKED_SCORE).reshape(scores.shape)
