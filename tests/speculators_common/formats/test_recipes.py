"""Recipes of parameters that are assembled from several tensors."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from dspark_jax.speculators_common.formats.recipes import joined_biases, joined_rows, stacked_columns


def test_tensors_of_one_kernel_may_be_stored_in_different_types() -> None:
    """float16 and bfloat16 have no common type in NumPy; float32 holds both exactly."""
    key, value = np.asarray([[1.5, -2.25]], np.float16), np.asarray([[3.0, 1 / 3]], jnp.bfloat16)
    kernel = stacked_columns({"k": (1, 2), "v": (1, 2)}, axes=("hidden", "heads")).assemble([key, value])
    np.testing.assert_array_equal(kernel, np.asarray([[1.5, 3.0], [-2.25, np.float32(value[0, 1])]], np.float32))
    bias = joined_biases({"k": (2,), "v": (2,)}, axes=("heads",)).assemble([key[0], value[0]])
    np.testing.assert_array_equal(bias, np.asarray([1.5, -2.25, 3.0, np.float32(value[0, 1])], np.float32))


def test_tensors_of_one_type_keep_it() -> None:
    rows = [np.zeros((2, 3), jnp.bfloat16), np.ones((1, 3), jnp.bfloat16)]
    assert joined_rows(rows).dtype == jnp.bfloat16
