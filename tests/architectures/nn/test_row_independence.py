"""The results of a token do not depend on the number of tokens in the step, bit for bit.

So plain and speculative decoding produce the same text in bfloat16.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.architectures.nn.attention.kv_cache import KVCache, KVPages
from dspark_jax.architectures.nn.attention.kv_params import KVParams
from dspark_jax.architectures.nn.attention.ragged_batch import RaggedBatch
from dspark_jax.architectures.nn.mlp import GatedMLP
from dspark_jax.architectures.nn.norms import RMSNorm
from dspark_jax.speculators_common.numerics.platform import Platform

CPU = Platform.of("cpu")
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = (
    9,
    3,
    64,
    64,
)  # of the demo target: sizes at which XLA:CPU changes its kernels between one row and several
HIDDEN = HEADS * HEAD_DIM
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="a property of the kernels that XLA:CPU chooses")


@pytest.mark.parametrize("num_pages", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(dtype: str, num_pages: int) -> None:
    rng = np.random.default_rng(0)
    params = KVParams(
        num_layers=1,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        page_size=PAGE_SIZE,
        dtype=DTYPES[dtype],
        platform=CPU,
    )
    length = num_pages * PAGE_SIZE
    table = jnp.arange(num_pages, dtype=jnp.int32)[None]
    cache = KVCache(pages=KVPages.zeros(params, num_pages), page_table=table, lengths=jnp.asarray([length], jnp.int32))
    everywhere = RaggedBatch.rectangle(jnp.zeros((1, length), jnp.int32), jnp.arange(length, dtype=jnp.int32)[None])
    keys, values = (jnp.asarray(rng.normal(size=(length, KV_HEADS, HEAD_DIM)), jnp.float32) for _ in range(2))
    cache = cache.write(0, everywhere, keys, values)

    @jax.jit
    def attend(query: Any, positions: Any) -> Any:
        batch = RaggedBatch.rectangle(jnp.zeros_like(positions)[None], positions[None])
        return cache.paged_attention(0, query, batch, scale=HEAD_DIM**-0.5)

    for start in range(20, length - 7, 31):
        query = jnp.asarray(rng.normal(size=(7, HEADS, HEAD_DIM)), jnp.float32)
        positions = jnp.arange(start, start + 7, dtype=jnp.int32)
        alone = np.concatenate([attend(query[row : row + 1], positions[row : row + 1]) for row in range(7)])
        for rows in (3, 4, 7):
            np.testing.assert_array_equal(attend(query[:rows], positions[:rows]), alone[:rows])


@pytest.mark.parametrize(
    "layer",
    [RMSNorm(HIDDEN, 1e-5), GatedMLP(HIDDEN, 2 * HIDDEN, dtype=jnp.bfloat16, platform=CPU, rngs=nnx.Rngs(0))],
    ids=lambda layer: type(layer).__name__,
)
def test_layers(layer: Any) -> None:
    """In bfloat16 only: XLA computes a float32 product of one row by another kernel than that of several rows."""
    rng = np.random.default_rng(0)
    graphdef, state = nnx.split(layer)
    call = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))
    for _ in range(5):
        x = jnp.asarray(rng.normal(size=(7, HIDDEN)), jnp.float32)
        alone = np.concatenate([call(state, x[row : row + 1]) for row in range(7)])
        for rows in (3, 4, 7):
            np.testing.assert_array_equal(call(state, x[:rows]), alone[:rows])
