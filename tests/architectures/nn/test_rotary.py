"""Rotary embedding against a second implementation in float64, written with complex numbers."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.architectures.nn.rotary import inverse_frequencies, rotary_angles, rotate
from dspark_jax.speculators_common.formats.rope.config import RopeConfig

LLAMA3 = RopeConfig(
    theta=500000.0,
    rotary_dim=64,
    kind="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
ROPES = {
    "default": RopeConfig(theta=10000.0, rotary_dim=64),
    "large base": RopeConfig(theta=5e6, rotary_dim=64),
    "partial": RopeConfig(theta=10000.0, rotary_dim=24),
    "linear": RopeConfig(theta=1e6, rotary_dim=64, kind="linear", factor=8.0),
    "llama3": LLAMA3,
}
HEAD_DIM = 64

pytestmark = pytest.mark.usefixtures("quick_compilation")


def _frequencies(rope: RopeConfig) -> np.ndarray:
    """The llama3 frequencies as the reference states them: by the wavelength of each pair, in three ranges."""
    plain = np.asarray([rope.theta ** (-2 * pair / rope.rotary_dim) for pair in range(rope.rotary_dim // 2)])
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "default":
        return plain
    scaled = []
    for frequency in plain:
        wavelength, length = 2 * np.pi / frequency, rope.original_max_position_embeddings
        if wavelength < length / rope.high_freq_factor:
            scaled.append(frequency)
        elif wavelength > length / rope.low_freq_factor:
            scaled.append(frequency / rope.factor)
        else:
            smooth = (length / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
            scaled.append((1 - smooth) * frequency / rope.factor + smooth * frequency)
    return np.asarray(scaled)


def _rotated(x: np.ndarray, positions: np.ndarray, rope: RopeConfig) -> np.ndarray:
    half = rope.rotary_dim // 2
    turn = np.exp(1j * positions[:, None] * _frequencies(rope))[:, None, :]
    pairs = (x[..., :half] + 1j * x[..., half : 2 * half]) * turn
    return np.concatenate([pairs.real, pairs.imag, x[..., 2 * half :]], axis=-1)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_frequencies(rope: RopeConfig) -> None:
    found = inverse_frequencies(rope)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, _frequencies(rope), rtol=2e-7)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_rotation(rope: RopeConfig) -> None:
    """Angles are float32, so the allowed error grows with the position."""
    positions = np.asarray([0, 1, 2, 17, 500, 4096])
    x = np.random.default_rng(0).normal(size=(len(positions), 3, HEAD_DIM))
    found = np.asarray(rotate(jnp.asarray(x, jnp.float32), rotary_angles(jnp.asarray(positions, jnp.int32), rope)))
    for index, position in enumerate(positions):
        np.testing.assert_allclose(
            found[index], _rotated(x, positions, rope)[index], rtol=0, atol=2e-6 + 4e-7 * position
        )


def test_llama3_has_pairs_in_all_three_ranges() -> None:
    ratio = _frequencies(LLAMA3) / _frequencies(RopeConfig(theta=LLAMA3.theta, rotary_dim=64))
    assert ratio.max() == 1
    assert ratio.min() == pytest.approx(1 / 8)
    assert ((ratio > 0.13) & (ratio < 0.99)).any()


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_scores_depend_on_the_distance_alone(rope: RopeConfig) -> None:
    query, key = np.random.default_rng(1).normal(size=(2, 1, 1, HEAD_DIM)).astype(np.float32)

    def score(query_position: int, key_position: int) -> float:
        turned = [
            np.asarray(rotate(jnp.asarray(x), rotary_angles(jnp.asarray([position], jnp.int32), rope)), np.float64)
            for x, position in ((query, query_position), (key, key_position))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-3)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)


def test_any_position_is_finite_and_the_dtype_stays() -> None:
    """Positions beyond any stated maximum and padding give finite values. Float32 is exact for positions up to 2^24."""
    positions = jnp.asarray([-1, 131_072, 10_000_000], jnp.int32)
    out = rotate(jnp.ones((3, 1, HEAD_DIM), jnp.bfloat16), rotary_angles(positions, LLAMA3))
    assert out.dtype == jnp.bfloat16
    assert bool(jnp.isfinite(out.astype(jnp.float32)).all())
