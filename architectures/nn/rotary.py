"""Rotary position embedding, computed from positions: no table, so no position is ever out of range.

Half-split pairing: element `i` rotates with element `i + rotary_dim / 2`. Frequencies and angles are float32.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from dspark_jax.speculators_common.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig) -> np.ndarray:
    """Radians per position of each rotating pair, float32 `[rotary_dim / 2]`."""
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    frequencies = rope.theta**-exponents
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3(frequencies, rope)
    return frequencies.astype(np.float32)


def _llama3(frequencies: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Llama 3 context extension: slow pairs are slowed by `factor`, fast ones kept, a linear blend between."""
    rotations = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    blend = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return blend * frequencies + (1 - blend) * frequencies / rope.factor


def rotary_angles(positions: Int32[Array, "*axes"], rope: RopeConfig) -> tuple[Float[Array, "*axes R"], Float[Array, "*axes R"]]:
    """Cosine and sine per position and pair."""
    angles = positions[..., None].astype(jnp.float32) * jnp.expand_dims(inverse_frequencies(rope), tuple(range(positions.ndim)))
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "*axes heads hd"], angles: tuple[Float[Array, "*axes R"], Float[Array, "*axes R"]]) -> Float[Array, "*axes heads hd"]:
    """Rotate the leading `2 R` elements of every head; the rest passes through. Computed in float32."""
    cos, sin = (a[..., None, :] for a in angles)
    half = cos.shape[-1]
    first, second, rest = (part.astype(jnp.float32) for part in jnp.split(x, [half, 2 * half], axis=-1))
    rotated = [first * cos - second * sin, second * cos + first * sin, rest]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
