"""Rotation frequencies of every RoPE type against values worked out by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.architectures.nn.rotary import inverse_frequencies, rotary_angles, rotate
from dspark_jax.speculators_common.formats.rope.config import RopeConfig

THETA = 1e6
DEFAULT = RopeConfig(theta=THETA, rotary_dim=128)
YARN = RopeConfig(
    theta=THETA, rotary_dim=128, kind="yarn", factor=4.0, original_max_position_embeddings=32768, attention_factor=1.25
)
PROPORTIONAL = RopeConfig(theta=THETA, rotary_dim=32, kind="proportional", rotating_pairs=4)


def test_default_frequencies_fall_from_one_by_equal_factors():
    frequencies = inverse_frequencies(DEFAULT)
    assert frequencies.dtype == np.float32
    assert frequencies.shape == (64,)
    np.testing.assert_allclose(frequencies[[0, 16, 32, 48]], [1.0, THETA**-0.25, THETA**-0.5, THETA**-0.75], rtol=1e-6)


def test_linear_scaling_slows_every_pair():
    linear = RopeConfig(theta=THETA, rotary_dim=128, kind="linear", factor=8.0)
    np.testing.assert_allclose(inverse_frequencies(linear) * 8, inverse_frequencies(DEFAULT), rtol=1e-6)


def test_llama3_scaling_keeps_fast_pairs_and_slows_slow_ones():
    rope = RopeConfig(theta=THETA, rotary_dim=128, kind="llama3", factor=8.0, original_max_position_embeddings=8192)
    kept = inverse_frequencies(rope) / inverse_frequencies(DEFAULT)
    turns = 8192 * inverse_frequencies(DEFAULT) / (2 * np.pi)
    np.testing.assert_allclose(kept[turns > 4], 1.0, rtol=1e-6)
    np.testing.assert_allclose(kept[turns < 1], 1 / 8, rtol=1e-6)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    np.testing.assert_allclose(kept[between], 1 / 8 + (turns[between] - 1) / 3 * 7 / 8, rtol=1e-5)


def test_yarn_slows_the_slow_pairs_by_a_ramp_between_two_whole_pairs():
    """The ramp is from pair 23 to pair 40.

    Pair 23.6 makes 32 rotations over 32768 positions, and pair 39.7 makes one.
    """
    kept = inverse_frequencies(YARN) / inverse_frequencies(DEFAULT)
    np.testing.assert_allclose(kept[:24], 1.0, rtol=1e-6)
    np.testing.assert_allclose(kept[40:], 0.25, rtol=1e-6)
    np.testing.assert_allclose(kept[24:40], 1 - 0.75 * np.arange(1, 17) / 17, rtol=1e-5)


def test_yarn_scales_queries_and_keys_by_its_attention_factor():
    positions = jnp.asarray([0, 7], jnp.int32)
    x = jax.random.normal(jax.random.key(0), (2, 3, 128))
    norms = jnp.linalg.norm(rotate(x, rotary_angles(positions, YARN)), axis=-1) / jnp.linalg.norm(x, axis=-1)
    np.testing.assert_allclose(norms, 1.25, rtol=1e-5)


def test_a_yarn_ramp_of_no_width_is_a_step():
    rope = RopeConfig(
        theta=THETA,
        rotary_dim=8,
        kind="yarn",
        factor=4.0,
        original_max_position_embeddings=6,
        beta_fast=2.0,
        beta_slow=1.5,
    )
    np.testing.assert_allclose(
        inverse_frequencies(rope), [1.0, *(THETA ** -np.asarray([0.25, 0.5, 0.75]) / 4)], rtol=1e-6
    )


def test_proportional_rotation_turns_the_first_pairs_with_the_frequencies_of_a_whole_head():
    frequencies = inverse_frequencies(PROPORTIONAL)
    np.testing.assert_allclose(frequencies[:4], THETA ** -(np.arange(4) / 16), rtol=1e-6)
    np.testing.assert_array_equal(frequencies[4:], 0)


def test_proportional_rotation_pairs_across_the_whole_head_and_leaves_the_rest_alone():
    positions = jnp.asarray([5], jnp.int32)
    x = jax.random.normal(jax.random.key(1), (1, 1, 32))
    rotated, x = np.asarray(rotate(x, rotary_angles(positions, PROPORTIONAL)))[0, 0], np.asarray(x)[0, 0]
    still = np.asarray([*range(4, 16), *range(20, 32)])
    np.testing.assert_array_equal(rotated[still], x[still])
    turned = (x[:4] + 1j * x[16:20]) * np.exp(5j * inverse_frequencies(PROPORTIONAL)[:4])
    np.testing.assert_allclose(rotated[:4], turned.real, atol=1e-6)
    np.testing.assert_allclose(rotated[16:20], turned.imag, atol=1e-6)


@pytest.mark.parametrize("factor", [2.0, 8.0])
def test_proportional_rotation_may_be_scaled(factor):
    scaled = RopeConfig(theta=THETA, rotary_dim=32, kind="proportional", rotating_pairs=4, factor=factor)
    np.testing.assert_allclose(inverse_frequencies(scaled) * factor, inverse_frequencies(PROPORTIONAL), rtol=1e-6)
