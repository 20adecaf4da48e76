"""Softmax attention over the union of several sets of keys, in plain XLA: the arithmetic that every backend is held
against.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dspark_jax.architectures.nn.attention.masks import block_mask
from dspark_jax.speculators_common.formats.draft_config import LayerMask, WindowOrigin
from dspark_jax.speculators_common.numerics.platform import SoftmaxForm

# Finite, so that a query that sees nothing (an inert token) gives a finite, meaningless row instead of NaN.
_HIDDEN = -1e30
# One column would be a matrix-vector product, which XLA:CPU sums in an order that depends on the number of rows.
_ONES_COLUMNS = 8


class KeySet(NamedTuple):
    """Keys and values of every row, and which of them each query sees.

    Both are `[B, K, S, hd]` where `head_major`, else `[B, S, K, hd]`.
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
        """The axes as letters of an einsum."""
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
    """A block's own keys and values, as its first `num_queries` slots see them; dtype and order of axes as `like`."""
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
    """Attention of every query over all sets together; query head n reads key head `n // (N / K)`.

    `row_independent`: how many rows a step has does not change what any of them becomes. In bfloat16 the last bit
    decides which way a value is rounded, and plain and speculative decoding would part at near-ties. XLA:CPU chooses
    another exponential and another order of summation for a large array that is reduced. So the weights are summed by
    a matrix product, whose rows do not depend on each other.
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
    """`exp(score - largest score of all sets)`.

    The maximum, which is exact in any order, is kept apart from the exponential by a choice that always comes out the
    same: fused, XLA:CPU would choose the exponential by the size of the array.
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
    return jnp.where(key_set.visible[:, None, None], per_head, _HIDDEN).reshape(scores.shape)
