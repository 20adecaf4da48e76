"""Linear maps: the same values and products in either storage orientation, for one row and for many."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.architectures.module_loading import load_module
from dspark_jax.speculators_common.formats.recipes import transposed
from dspark_jax.speculators_common.numerics.linear import Linear
from dspark_jax.speculators_common.numerics.matmul import OutputMajorKernel, kernel_parameter, kernel_values, linear

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
SIZES = [(24, 40), (40, 24), (32, 32)]


@dataclasses.dataclass(frozen=True)
class Stored:
    """A checkpoint tensor in memory."""

    values: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> str:
        return str(self.values.dtype)

    def read(self) -> np.ndarray:
        return self.values


def kernels(in_features: int, out_features: int, dtype: Any) -> list[nnx.Param]:
    """One set of values in both orientations."""
    values = jax.random.normal(jax.random.key(in_features), (in_features, out_features), dtype)
    return [nnx.Param(values), OutputMajorKernel(values.T)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("axes", [(), (1,), (1, 1), (2,), (3, 5)])
def test_both_orientations_give_the_product(dtype: str, size: tuple[int, int], axes: tuple[int, ...]) -> None:
    x = jax.random.normal(jax.random.key(3), (*axes, size[0]), DTYPES[dtype])
    for kernel in kernels(*size, DTYPES[dtype]):
        product = linear(x, kernel)
        expected = np.asarray(x, np.float64) @ np.asarray(kernel_values(kernel), np.float64)
        assert product.dtype == jnp.float32
        assert product.shape == (*axes, size[1])
        np.testing.assert_allclose(product, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_a_kernel_keeps_its_values_in_the_orientation_that_is_chosen(dtype: str, size: tuple[int, int]) -> None:
    values = jax.random.normal(jax.random.key(1), size, DTYPES[dtype])
    np.testing.assert_array_equal(kernel_values(kernel_parameter(values)), values)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="only XLA:CPU prefers an orientation")
def test_float32_and_bfloat16_prefer_opposite_orientations() -> None:
    chosen = {
        (name, size): type(kernel_parameter(jnp.zeros(size, dtype)))
        for name, dtype in DTYPES.items()
        for size in SIZES[:2]
    }
    assert [chosen["float32", size] is OutputMajorKernel for size in SIZES[:2]] == [False, True]
    assert [chosen["bfloat16", size] is OutputMajorKernel for size in SIZES[:2]] == [True, False]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_a_checkpoint_tensor_is_loaded_into_either_orientation(dtype: str, size: tuple[int, int]) -> None:
    stored = np.random.default_rng(0).standard_normal(size[::-1]).astype(np.float32)  # [out, in]
    recipes = {"kernel": transposed("weight", size[::-1], axes=(None, None))}
    module = load_module(
        lambda: Linear(*size, dtype=DTYPES[dtype], rngs=nnx.Rngs(0)), recipes, {"weight": Stored(stored)}, file="x"
    )
    np.testing.assert_array_equal(kernel_values(module.kernel), stored.T.astype(DTYPES[dtype]))
