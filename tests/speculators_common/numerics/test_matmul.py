"""Linear maps: both storage orientations give the same values and products, for one row and for several."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.architectures.module_loading import load_module
from dspark_jax.speculators_common.formats.recipes import transposed
from dspark_jax.speculators_common.numerics.linear import Linear, LinearStack
from dspark_jax.speculators_common.numerics.matmul import (
    OutputMajorKernel,
    kernel_parameter,
    kernel_product,
    kernel_values,
    set_kernel_values,
)
from dspark_jax.speculators_common.numerics.platform import Platform
from dspark_jax.speculators_common.numerics.rows import decode_rows

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
CPU, TPU = Platform.of("cpu"), Platform.of("tpu")
SIZES = [(160, 192), (192, 160), (128, 128)]


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


def normal(shape: tuple[int, ...], dtype: Any, *, seed: int) -> jax.Array:
    """Random values, drawn without a compiled program."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def kernels(in_features: int, out_features: int, dtype: Any) -> list[nnx.Param]:
    """Two kernels with the same values, one in each storage orientation."""
    values = normal((in_features, out_features), dtype, seed=in_features)
    return [nnx.Param(values), OutputMajorKernel(values.T)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("axes", [(), (1,), (1, 1), (2,), (3, 5)])
def test_both_orientations_give_the_product(dtype: str, size: tuple[int, int], axes: tuple[int, ...]) -> None:
    x = normal((*axes, size[0]), DTYPES[dtype], seed=3)
    for kernel in kernels(*size, DTYPES[dtype]):
        product = kernel_product(x, kernel, CPU)
        expected = np.asarray(x, np.float64) @ np.asarray(kernel_values(kernel), np.float64)
        assert product.dtype == jnp.float32
        assert product.shape == (*axes, size[1])
        np.testing.assert_allclose(product, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_a_kernel_keeps_its_values_in_the_orientation_that_is_chosen(dtype: str, size: tuple[int, int]) -> None:
    values = normal(size, DTYPES[dtype], seed=1)
    np.testing.assert_array_equal(kernel_values(kernel_parameter(values, CPU)), values)


def test_float32_and_bfloat16_prefer_opposite_orientations() -> None:
    chosen = {
        (name, size): type(kernel_parameter(jnp.zeros(size, dtype), CPU))
        for name, dtype in DTYPES.items()
        for size in SIZES[:2]
    }
    assert [chosen["float32", size] is OutputMajorKernel for size in SIZES[:2]] == [False, True]
    assert [chosen["bfloat16", size] is OutputMajorKernel for size in SIZES[:2]] == [True, False]


def test_a_bfloat16_kernel_of_few_inputs_stays_input_major() -> None:
    """W2 of a Markov head of rank 48: output-major storage would be a quarter slower to read."""
    assert type(kernel_parameter(jnp.zeros((48, 4096), jnp.bfloat16), CPU)) is nnx.Param
    assert type(kernel_parameter(jnp.zeros((256, 4096), jnp.bfloat16), CPU)) is OutputMajorKernel


def test_only_a_cpu_chooses_the_orientation_by_size() -> None:
    for dtype, size in itertools.product(DTYPES.values(), SIZES):
        for name in ("tpu", "gpu"):
            assert type(kernel_parameter(jnp.zeros(size, dtype), Platform.of(name))) is nnx.Param


def test_values_that_are_set_are_read_back_in_either_orientation() -> None:
    for kernel in kernels(24, 40, jnp.float32):
        values = normal((24, 40), jnp.float32, seed=8)
        set_kernel_values(kernel, values)
        np.testing.assert_array_equal(kernel_values(kernel), values)


@pytest.mark.parametrize("platform", [CPU, TPU], ids=lambda platform: platform.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_only_a_cpu_pads_a_lone_bfloat16_row(dtype: str, platform: Platform) -> None:
    """In the traced program, the bfloat16 product has two rows on a CPU and one row on other platforms."""
    for kernel in kernels(24, 40, DTYPES[dtype]):
        graphdef, state = nnx.split(kernel)
        traced = jax.make_jaxpr(
            lambda state, x, graphdef=graphdef: kernel_product(x, nnx.merge(graphdef, state), platform)
        )(state, jnp.ones((1, 24)))
        (product,) = [equation for equation in traced.jaxpr.eqns if equation.primitive.name == "dot_general"]
        assert product.outvars[0].aval.shape[0] == (2 if platform == CPU and dtype == "bfloat16" else 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("platform", [CPU, TPU], ids=lambda platform: platform.name)
def test_a_scale_multiplies_the_float32_product_before_the_bias(dtype: str, platform: Platform) -> None:
    """If the product were rounded to bfloat16 first, the error would exceed the tolerance."""
    layer = Linear(24, 40, bias=True, scale=True, dtype=DTYPES[dtype], platform=platform, rngs=nnx.Rngs(0))
    plain = Linear(24, 40, dtype=DTYPES[dtype], platform=platform, rngs=nnx.Rngs(0))
    assert (plain.scale, plain.bias) == (None, None)
    assert layer.scale is not None
    assert layer.bias is not None
    assert layer.scale.dtype == jnp.float32
    x = normal((3, 24), DTYPES[dtype], seed=5)
    np.testing.assert_array_equal(layer.float32(x), plain.float32(x))
    scale, bias = np.linspace(-3, 3, 40, dtype=np.float32), np.linspace(5, 6, 40, dtype=np.float32)
    layer.scale[...], layer.bias[...] = jnp.asarray(scale), jnp.asarray(bias)
    wanted = np.asarray(x, np.float64) @ np.asarray(kernel_values(layer.kernel), np.float64) * scale + bias
    np.testing.assert_allclose(layer.float32(x), wanted, rtol=1e-5, atol=1e-5)
    assert layer(x).dtype == DTYPES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scaled", [False, True])
def test_a_stack_is_its_linear_maps_one_by_one(dtype: str, scaled: bool) -> None:
    count, size = 3, (24, 40)
    stack = LinearStack(count, *size, scale=scaled, dtype=DTYPES[dtype], platform=CPU, rngs=nnx.Rngs(0))
    scale = np.ones((count, size[1]), np.float32)
    if scaled:
        assert stack.scale is not None
        scale = np.linspace(-2, 2, scale.size, dtype=np.float32).reshape(scale.shape)
        stack.scale[...] = jnp.asarray(scale)
    values = np.asarray(decode_rows(stack.kernel[...]), np.float64)
    x = np.asarray(normal((count, 5, size[0]), DTYPES[dtype], seed=6))
    each = np.einsum("eti,eio->eto", x.astype(np.float64), values) * scale[:, None]
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(stack.each(jnp.asarray(x)), each, **close)
    np.testing.assert_allclose(stack.summed(jnp.asarray(x.swapaxes(0, 1))), each.sum(axis=0), **close)
    numbers = np.asarray([2, 0, 2, 1, 1], np.int32)
    picked = stack.picked(jnp.asarray(x[numbers, range(5)]), jnp.asarray(numbers))
    np.testing.assert_allclose(picked, each[numbers, range(5)], **close)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_a_checkpoint_tensor_is_loaded_into_either_orientation(dtype: str, size: tuple[int, int]) -> None:
    stored = np.random.default_rng(0).standard_normal(size[::-1]).astype(np.float32)  # [out, in]
    recipes = {"kernel": transposed("weight", size[::-1], axes=(None, None))}
    module = load_module(
        lambda: Linear(*size, dtype=DTYPES[dtype], platform=CPU, rngs=nnx.Rngs(0)),
        recipes,
        {"weight": Stored(stored)},
        file="x",
    )
    np.testing.assert_array_equal(kernel_values(module.kernel), stored.T.astype(DTYPES[dtype]))
