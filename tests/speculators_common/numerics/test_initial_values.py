"""The random values that new parameters begin with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.speculators_common.numerics.initial_values import initial_values


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_parameter_gets_other_values_and_a_seed_always_the_same(dtype: jax.typing.DTypeLike) -> None:
    """The keys are those that `rngs.params()` gives, so the two ways to draw can follow one another."""
    rngs, keys = nnx.Rngs(7), nnx.Rngs(7)
    drawn = [initial_values((31, 33), dtype, rngs) for _ in range(2)]
    again = [0.02 * jax.random.normal(keys.params(), (31, 33), dtype) for _ in range(2)]
    assert [values.dtype for values in drawn] == [dtype, dtype]
    np.testing.assert_allclose(np.asarray(drawn, np.float32), np.asarray(again, np.float32), rtol=1e-2)
    assert np.abs(np.corrcoef(np.ravel(drawn[0]).astype(np.float32), np.ravel(drawn[1]).astype(np.float32))[0, 1]) < 0.1
    np.testing.assert_allclose(np.std(np.asarray(drawn, np.float32), axis=(1, 2)), 0.02, rtol=0.1)
    np.testing.assert_array_equal(jax.random.key_data(rngs.params()), jax.random.key_data(keys.params()))
