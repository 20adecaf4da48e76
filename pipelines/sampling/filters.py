"""Temperature, top-k, top-p and min-p: which tokens a row may choose, and their weights.

The order is that of transformers: temperature, top-k, top-p over what top-k kept, min-p. No vocabulary is sorted: a
filter keeps the tokens above a threshold, and the threshold is found by bisection over the bits of float32. It is
searched among a few large logits first, and among all only where it is not among those. Tokens with equal logits are
kept or removed together, where a sort would separate them by chance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from dspark_jax.pipelines.sampling.candidates import likely_candidates
from dspark_jax.pipelines.sampling.controls import Controls
from dspark_jax.pipelines.sampling.draws import row_sums

_INFINITY = 0x7F800000  # its bits as float32
_NUM_BLOCKS = 64  # that are searched first: enough for a top-k of 64, and for most nuclei


def token_weights(logits: Float[Array, "T V"], controls: Controls) -> Float[Array, "T V"]:
    """Probabilities after temperature and filters, times a positive factor of the row. 0 for removed tokens.

    `controls` has one entry per row of `logits`. A temperature of 0 counts as 1 here. A row whose logits are all -inf,
    or not finite, gives no positive finite total.
    """
    largest = jnp.max(logits, axis=1, keepdims=True)
    searches = (controls.top_k > 0) | (controls.top_p < 1)
    furthest = jax.lax.cond(jnp.any(searches), _furthest, _no_limit, logits, largest, controls)
    distance = _distance(logits, largest, controls)
    weights = jnp.exp(-distance)
    return jnp.where((distance <= furthest[:, None]) & (weights >= controls.min_p[:, None]), weights, 0)


def _distance(logits: Float[Array, "T n"], largest: Float[Array, "T 1"], controls: Controls) -> Float[Array, "T n"]:
    """How far logits are below the largest of their row, by temperature; infinite for what is not finite.

    `where` also keeps XLA:CPU from fusing the maximum with the exponential, see `key_sets.py`.
    """
    temperature = jnp.where(controls.temperature > 0, controls.temperature, 1.0)
    distance = (largest - logits) / temperature[:, None]
    return jnp.where(distance >= 0, distance, jnp.inf)


def _no_limit(logits: Float[Array, "T V"], largest: Float[Array, "T 1"], controls: Controls) -> Float[Array, "T"]:
    return jnp.full((logits.shape[0],), jnp.inf, jnp.float32)


def _furthest(logits: Float[Array, "T V"], largest: Float[Array, "T 1"], controls: Controls) -> Float[Array, "T"]:
    """The largest distance of a token that top-k and top-p keep."""
    candidates = likely_candidates(logits, _NUM_BLOCKS)
    beyond = _distance(candidates.bound[:, None], largest, controls)[:, 0]
    few = _Tokens(_distance(candidates.values, largest, controls), beyond)
    everything = _Tokens(_distance(logits, largest, controls), jnp.full_like(beyond, jnp.inf))
    is_on, wanted = controls.top_k > 0, jnp.minimum(controls.top_k, logits.shape[1]).astype(jnp.float32)
    top_k = _search(few, everything, is_on, lambda distance: _least(jnp.ones_like(distance), distance, wanted, is_on))

    def kept(distance: Float[Array, "T n"]) -> Float[Array, "T n"]:
        return jnp.where(distance <= top_k[:, None], jnp.exp(-distance), 0)

    is_few = top_k < few.beyond  # the tokens that top-k keeps are among the few
    total = row_sums(kept(few.distance))
    total = jax.lax.cond(
        jnp.all(is_few), lambda: total, lambda: jnp.where(is_few, total, row_sums(kept(everything.distance)))
    )
    is_on, mass = controls.top_p < 1, controls.top_p * total
    top_p = _search(few, everything, is_on, lambda distance: _least(kept(distance), distance, mass, is_on))
    return jnp.minimum(top_k, top_p)


class _Tokens(NamedTuple):
    """Some tokens of each row by their distances. All tokens that are nearer than `beyond` are among them."""

    distance: Float[Array, "T n"]
    beyond: Float[Array, "T"]


def _search(
    few: _Tokens,
    everything: _Tokens,
    is_on: Bool[Array, "T"],
    search: Callable[[Float[Array, "T n"]], Float[Array, "T"]],
) -> Float[Array, "T"]:
    """What `search(distances)` finds among few tokens, or, where that is not nearer than all others, among all. All are
    searched only if some row needs it.
    """
    found = search(few.distance)
    is_sure = (found < few.beyond) | ~is_on
    return jax.lax.cond(jnp.all(is_sure), lambda: found, lambda: jnp.where(is_sure, found, search(everything.distance)))


def _least(
    weights: Float[Array, "T n"], distance: Float[Array, "T n"], wanted: Float[Array, "T"], is_on: Bool[Array, "T"]
) -> Float[Array, "T"]:
    """The least distance at which the weights of all entries up to it reach `wanted`; infinite where off, or where they
    never do.
    """
    # Floats that are not negative are in the order of their bits. Adding 0 makes -0 equal to 0.
    bits = jax.lax.bitcast_convert_type(distance + 0.0, jnp.int32)

    def halve(bounds: tuple[Int32[Array, "T"], Int32[Array, "T"]]) -> tuple[Int32[Array, "T"], Int32[Array, "T"]]:
        below, reached = bounds
        middle = below + (reached - below) // 2
        enough = row_sums(jnp.where(bits <= middle[:, None], weights, 0)) >= wanted
        return jnp.where(enough, below, middle), jnp.where(enough, middle, reached)

    def is_open(bounds: tuple[Int32[Array, "T"], Int32[Array, "T"]]) -> Bool[Array, ""]:
        return jnp.any(bounds[1] - bounds[0] > 1)

    reached = jnp.full(wanted.shape, _INFINITY, jnp.int32)
    below = jnp.where(is_on, -1, reached - 1)
    return jax.lax.bitcast_convert_type(jax.lax.while_loop(is_open, halve, (below, reached))[1], jnp.float32)
