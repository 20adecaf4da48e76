"""Both forms of argmax give the result of numpy for every size, also for equal entries."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.speculators_common.numerics.argmax import argmax
from dspark_jax.speculators_common.numerics.platform import ArgmaxForm

SIZES = [1, 5, 64, 65, 128, 4096]

pytestmark = [
    pytest.mark.usefixtures("quick_compilation"),
    pytest.mark.parametrize("form", ["blockwise", "plain"]),
]


@pytest.mark.parametrize("size", SIZES)
def test_random_rows(size: int, form: ArgmaxForm) -> None:
    logits = np.random.default_rng(size).normal(size=(3, 2, size)).astype(np.float32)
    found = argmax(jnp.asarray(logits), form)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, logits.argmax(axis=-1))


@pytest.mark.parametrize("size", SIZES)
def test_the_first_of_equal_entries_wins(size: int, form: ArgmaxForm) -> None:
    """Rounded values are equal within a block and between blocks; in constant rows all are equal."""
    rng = np.random.default_rng(size)
    logits = np.concatenate([rng.integers(-2, 3, (8, size)), np.full((1, size), 4), np.full((1, size), -7)]).astype(
        np.float32
    )
    np.testing.assert_array_equal(argmax(jnp.asarray(logits), form), logits.argmax(axis=-1))


@pytest.mark.parametrize("size", [5, 128, 1024])
def test_every_place_can_win(size: int, form: ArgmaxForm) -> None:
    assert argmax(jnp.eye(size), form).tolist() == list(range(size))


@pytest.mark.parametrize("size", [5, 128])
def test_infinities(size: int, form: ArgmaxForm) -> None:
    logits = np.full((3, size), -np.inf, np.float32)
    logits[1, size - 1], logits[2, 1] = -1e30, np.inf
    assert argmax(jnp.asarray(logits), form).tolist() == [0, size - 1, 1]


@pytest.mark.parametrize("size", [5, 128, 1024])
def test_a_row_with_nan_gives_an_id_of_the_vocabulary_and_leaves_other_rows_alone(size: int, form: ArgmaxForm) -> None:
    logits = np.random.default_rng(0).normal(size=(4, size)).astype(np.float32)
    logits[0], logits[1, 3], logits[2, -1] = np.nan, np.nan, np.nan
    found = np.asarray(argmax(jnp.asarray(logits), form))
    assert ((found >= 0) & (found < size)).all()
    assert found[3] == logits[3].argmax()


def test_bfloat16_rows(form: ArgmaxForm) -> None:
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(4, 512)), jnp.bfloat16)
    np.testing.assert_array_equal(argmax(logits, form), np.asarray(logits, np.float32).argmax(axis=-1))
