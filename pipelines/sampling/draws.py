"""Keyed random draws. A number depends on the seed of its request, the position of its token, and its purpose alone.

So a request with a seed gets the same text alone, in every slot of every batch, and in plain and speculative decoding.
No number serves two purposes: a shared stream would make acceptance depend on what was proposed.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32

_LANES = 64


class Purpose(enum.IntEnum):
    """What a random number decides. A choice among weights takes two numbers, its own and the next one."""

    TARGET_CHOICE = 0
    DRAFT_CHOICE = 2
    RESIDUAL_CHOICE = 4
    ACCEPTANCE = 6


_NUMBERS = 8  # of one position, whether they are used or not


class Uniforms:
    """The random numbers of some positions, in `[0, 1)`, float32."""

    def __init__(self, seed: UInt32[Array, "T words"], positions: Int32[Array, "T"]) -> None:
        """`positions[t]` is the position of the token that is decided, for a request with `seed[t]`."""

        def numbers(words: UInt32[Array, "words"], position: Int32[Array, ""]) -> Float[Array, "n"]:
            key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), position)
            return jax.random.uniform(key, (_NUMBERS,), jnp.float32)

        self._numbers = jax.vmap(numbers)(seed, positions)

    def one(self, purpose: Purpose) -> Float[Array, "T"]:
        """One number per position."""
        return self._numbers[:, purpose]

    def pair(self, purpose: Purpose) -> Float[Array, "T pair"]:
        """Two numbers per position, for `weighted_choice`."""
        return self._numbers[:, purpose : purpose + 2]


def weighted_choice(weights: Float[Array, "T V"], uniforms: Float[Array, "T pair"]) -> Int32[Array, "T"]:
    """Index `v` with probability `weights[t, v] / sum(weights[t])`. An entry of weight 0 is never chosen.

    Entry `v` is in group `v % 64`. The first number chooses a group by its total, the second one an entry of the group.
    Two small choices need no cumulative sum over the vocabulary, and each has the full resolution of its number. A row
    without a positive finite total gives an arbitrary valid index.
    """
    grouped = in_lanes(weights)
    group = _choice(jnp.sum(grouped, axis=1), uniforms[:, 0])
    members = jnp.take_along_axis(grouped, group[:, None, None], axis=2)[:, :, 0]
    return _choice(members, uniforms[:, 1]) * grouped.shape[2] + group


def row_sums(values: Float[Array, "T V"]) -> Float[Array, "T"]:
    """The sum of every row, in an order that does not depend on the number of rows."""
    return jnp.sum(jnp.sum(in_lanes(values), axis=1), axis=1)


def in_lanes(values: Float[Array, "T V"]) -> Float[Array, "T n lanes"]:
    """Each row as 64 interleaved groups, padded with zeros. XLA:CPU vectorises a sum over the middle axis only."""
    rows, size = values.shape
    lanes = min(_LANES, size)
    return jnp.pad(values, ((0, 0), (0, -size % lanes))).reshape(rows, -1, lanes)


def _choice(weights: Float[Array, "T n"], uniform: Float[Array, "T"]) -> Int32[Array, "T"]:
    cumulative = jnp.cumsum(weights, axis=1)
    reached: Bool[Array, "T n"] = (cumulative > uniform[:, None] * cumulative[:, -1:]) & (weights > 0)
    # Rounding can leave no entry at the very end of the range: then the heaviest one stands for it.
    first, heaviest = jnp.argmax(reached, axis=1), jnp.argmax(weights, axis=1)
    return jnp.where(jnp.any(reached, axis=1), first, heaviest).astype(jnp.int32)
