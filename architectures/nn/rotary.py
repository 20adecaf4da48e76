"""Rotary position embedding (RoPE), computed from the positions. There is no table, so every position is in range.

The pairing is half-split: element `i` of a head is rotated with element `i + rotary_dim / 2`. Frequencies and angles
are float32. Axis letter `R`: the number of pairs, `rotary_dim / 2`.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from dspark_jax.speculators_common.formats.rope.config import RopeConfig

Angles = tuple[Float[Array, "*axes R"], Float[Array, "*axes R"]]
"""Cosine and sine of every position and pair."""


def inverse_frequencies(rope: RopeConfig) -> np.ndarray:
    """Radians per position of each pair, float32 `[rotary_dim / 2]`, by the RoPE type of `rope`."""
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    frequencies = rope.theta**-exponents
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3(frequencies, rope)
    elif rope.kind == "yarn":
        frequencies = _yarn(frequencies, rope)
    elif rope.kind == "proportional":
        frequencies = np.where(np.arange(len(frequencies)) < rope.rotating_pairs, frequencies / rope.factor, 0.0)
    return frequencies.astype(np.float32)


def _llama3(frequencies: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Llama 3 context extension.

    The frequencies of slow pairs are divided by `factor`, those of fast pairs are kept. Between `low_freq_factor` and
    `high_freq_factor` rotations over the original length the two are blended linearly.
    """
    rotations = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    blend = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return blend * frequencies + (1 - blend) * frequencies / rope.factor


def _yarn(frequencies: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """YaRN context extension (arXiv 2309.00071).

    As Llama 3, but the blend is linear in the index of the pair, between two integer indices.
    """
    first = max(math.floor(_pair_with_rotations(rope.beta_fast, rope)), 0)
    last = min(math.ceil(_pair_with_rotations(rope.beta_slow, rope)), rope.rotary_dim - 1)
    width = last - first or 0.001
    slowed = np.clip((np.arange(len(frequencies)) - first) / width, 0.0, 1.0)
    return (1 - slowed) * frequencies + slowed * frequencies / rope.factor


def _pair_with_rotations(rotations: float, rope: RopeConfig) -> float:
    """The index, a real number, of the pair that makes `rotations` full turns over the original context length."""
    return (
        rope.rotary_dim
        * math.log(rope.original_max_position_embeddings / (2 * math.pi * rotations))
        / (2 * math.log(rope.theta))
    )


def rotary_angles(
    positions: Int32[Array, "*axes"], rope: RopeConfig
) -> tuple[Float[Array, "*axes R"], Float[Array, "*axes R"]]:
    """Cosine and sine of every position and pair, float32, times the `attention_factor` of YaRN."""
    angles = positions[..., None].astype(jnp.float32) * jnp.expand_dims(
        inverse_frequencies(rope), tuple(range(positions.ndim))
    )
    if rope.attention_factor == 1.0:
        return jnp.cos(angles), jnp.sin(angles)
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def rotate(
    x: Float[Array, "*axes heads hd"], angles: tuple[Float[Array, "*axes R"], Float[Array, "*axes R"]]
) -> Float[Array, "*axes heads hd"]:
    """Rotate the first `2 R` elements of every head and keep the others. Computed in float32, returned in x's dtype."""
    cos, sin = (a[..., None, :] for a in angles)
    half = cos.shape[-1]
    first, second, rest = (part.astype(jnp.float32) for part in jnp.split(x, [half, 2 * half], axis=-1))
    rotated = [first * cos - second * sin, second * cos + first * sin, rest]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
