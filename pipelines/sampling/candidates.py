"""The few entries of a long row that can matter, those of its largest blocks. Searching them replaces a sort.

`jax.lax.top_k` would find them too, but inside a loop XLA:CPU computes it by sorting the whole row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from dspark_jax.speculators_common.numerics.argmax import argmax

_Bounds = tuple[Int32[Array, "T"], Int32[Array, "T"]]
_BLOCK = 64
_LOWEST, _HIGHEST = -(2**31), 2**31 - 1


class Candidates(NamedTuple):
    """Entries of each row, in the order of their indices. Every other entry of the row is at most `bound`."""

    values: Float[Array, "T c"]
    ids: Int32[Array, "T c"]  # indices in the row; beyond its end for padding, whose value is -inf
    bound: Float[Array, "T"]  # -inf if the candidates are all entries


def likely_candidates(values: Float[Array, "T V"], num_blocks: int) -> Candidates:
    """The entries of the `num_blocks` blocks of 64 neighbours with the largest maxima.

    They hold the `num_blocks` largest entries of a row, up to entries that equal the smallest of these: a block is left
    out only if `num_blocks` others have a maximum at least as large.
    """
    rows, size = values.shape
    if size <= num_blocks * _BLOCK:
        ids = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None, :], values.shape)
        return Candidates(values, ids, jnp.full((rows,), -jnp.inf, values.dtype))
    blocks = jnp.pad(values, ((0, 0), (0, -size % _BLOCK)), constant_values=-jnp.inf).reshape(rows, -1, _BLOCK)
    maxima = jnp.max(blocks, axis=2)
    chosen, is_chosen = _largest(maxima, num_blocks)
    bound = jnp.max(jnp.where(is_chosen, -jnp.inf, maxima), axis=1)
    picked = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1)
    ids = chosen[:, :, None] * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32)[None, None, :]
    return Candidates(picked.reshape(rows, -1), ids.reshape(rows, -1), bound)


def in_falling_order(values: Float[Array, "T n"], count: int) -> tuple[Float[Array, "T k"], Int32[Array, "T k"]]:
    """The `count` largest entries of each row and their indices, largest first; of equal ones the first comes first."""
    row = jnp.arange(values.shape[0], dtype=jnp.int32)

    def take(left: Float[Array, "T n"], _: None) -> tuple[Float[Array, "T n"], tuple[Array, Array]]:
        place = argmax(left, "blockwise")
        return left.at[row, place].set(-jnp.inf), (values[row, place], place)

    _, (top, places) = jax.lax.scan(take, values, None, length=count)
    return top.T, places.T


def _largest(values: Float[Array, "T n"], count: int) -> tuple[Int32[Array, "T count"], Bool[Array, "T n"]]:
    """Ascending indices of the `count` largest entries, and which these are; of equal ones the first are taken."""
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    ordered = jnp.where(bits < 0, bits ^ _HIGHEST, bits)  # integers in the order of the floats

    def halve(
        _: Any, bounds: tuple[Int32[Array, "T"], Int32[Array, "T"]]
    ) -> tuple[Int32[Array, "T"], Int32[Array, "T"]]:
        reached, above = bounds
        middle = (reached & above) + ((reached ^ above) >> 1)  # their mean, without overflow
        enough = jnp.sum(ordered >= middle[:, None], axis=1, dtype=jnp.int32) >= count
        return jnp.where(enough, middle, reached), jnp.where(enough, above, middle)

    start = (jnp.full((values.shape[0],), _LOWEST, jnp.int32), jnp.full((values.shape[0],), _HIGHEST, jnp.int32))
    least, _ = jax.lax.fori_loop(0, 32, halve, start)
    is_larger, is_equal = ordered > least[:, None], ordered == least[:, None]
    room = count - jnp.sum(is_larger, axis=1, dtype=jnp.int32)
    is_chosen = is_larger | (is_equal & (jnp.cumsum(is_equal, axis=1, dtype=jnp.int32) <= room[:, None]))
    rank = jnp.cumsum(is_chosen, axis=1, dtype=jnp.int32)
    number = jnp.arange(count, dtype=jnp.int32)[None, :, None]
    return jnp.sum(rank[:, None, :] <= number, axis=2, dtype=jnp.int32), is_chosen
