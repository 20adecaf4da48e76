"""Temperature, top-k, top-p and min-p: which tokens a row may choose, and their weights.

The order is that of transformers: temperature, top-k, top-p over what top-k kept, min-p. No vocabulary is sorted: a
filter keeps the tokens above a threshold, and the threshold is found by bisection over the bits of float32. Tokens with
equal logits are kept or removed together, where a sort would separate them by chance.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from dspark_jax.pipelines.sampling.controls import Controls
from dspark_jax.pipelines.sampling.draws import row_sums

_ALL = 0x7F800000  # the bits of infinity: the distance of a token that is ruled out


def token_weights(logits: Float[Array, "T V"], controls: Controls) -> Float[Array, "T V"]:
    """Probabilities after temperature and filters, times a positive factor of the row. 0 for removed tokens.

    `controls` has one entry per row of `logits`. A temperature of 0 counts as 1 here. A row whose logits are all -inf,
    or not finite, gives no positive finite total.
    """
    largest = jnp.max(logits, axis=1, keepdims=True)
    temperature = jnp.where(controls.temperature > 0, controls.temperature, 1.0)
    distance = (largest - logits) / temperature[:, None]  # 0 for the most probable token
    # `where` keeps XLA:CPU from fusing the maximum with the exponential, see `key_sets.py`.
    weights = jnp.exp(-jnp.where(distance >= 0, distance, jnp.inf))
    filtered = (controls.top_k > 0) | (controls.top_p < 1) | (controls.min_p > 0)
    return jax.lax.cond(jnp.any(filtered), _filtered, lambda weights, *_: weights, weights, distance, controls)


def _filtered(weights: Float[Array, "T V"], distance: Float[Array, "T V"], controls: Controls) -> Float[Array, "T V"]:
    bits = jax.lax.bitcast_convert_type(jnp.abs(distance), jnp.int32)  # ordered like the distances

    def count(threshold: Int32[Array, "T"]) -> Float[Array, "T"]:
        return row_sums((bits <= threshold[:, None]).astype(jnp.float32))

    wanted = jnp.minimum(controls.top_k, weights.shape[1]).astype(jnp.float32)
    last = _least_threshold(count, wanted, controls.top_k > 0)
    weights = jnp.where(bits <= last[:, None], weights, 0)

    def mass(threshold: Int32[Array, "T"]) -> Float[Array, "T"]:
        return row_sums(jnp.where(bits <= threshold[:, None], weights, 0))

    last = _least_threshold(mass, controls.top_p * row_sums(weights), controls.top_p < 1)
    return jnp.where((bits <= last[:, None]) & (weights >= controls.min_p[:, None]), weights, 0)


def _least_threshold(
    total: Callable[[Int32[Array, "T"]], Float[Array, "T"]], wanted: Float[Array, "T"], is_on: Bool[Array, "T"]
) -> Int32[Array, "T"]:
    """The least threshold at which `total(threshold)`, a growing function, reaches `wanted`; where off, one that keeps
    every token.
    """

    def halve(bounds: tuple[Int32[Array, "T"], Int32[Array, "T"]]) -> tuple[Int32[Array, "T"], Int32[Array, "T"]]:
        below, reached = bounds
        middle = below + (reached - below) // 2
        enough = total(middle) >= wanted
        return jnp.where(enough, below, middle), jnp.where(enough, middle, reached)

    def is_open(bounds: tuple[Int32[Array, "T"], Int32[Array, "T"]]) -> Bool[Array, ""]:
        return jnp.any(bounds[1] - bounds[0] > 1)

    reached = jnp.full(wanted.shape, _ALL, jnp.int32)
    below = jnp.where(is_on, -1, reached - 1)
    return jax.lax.while_loop(is_open, halve, (below, reached))[1]
