"""The layer of experts: both ways of computing it equal a loop over tokens, and tokens do not influence each other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.architectures.qwen3_moe.experts import ExpertsMLP
from dspark_jax.speculators_common.numerics.matmul import kernel_values
from dspark_jax.speculators_common.numerics.platform import Platform

CPU, TPU = Platform.of("cpu"), Platform.of("tpu")
HIDDEN, WIDTH, EXPERTS, PICKED, TOKENS = 12, 10, 6, 2, 7

pytestmark = pytest.mark.usefixtures("quick_compilation")


def layer(*, normalised: bool = True, dtype=jnp.float32, platform: Platform = CPU) -> ExpertsMLP:
    experts = ExpertsMLP(
        HIDDEN,
        WIDTH,
        num_experts=EXPERTS,
        num_picked=PICKED,
        normalised=normalised,
        dtype=dtype,
        platform=platform,
        rngs=nnx.Rngs(0),
    )
    if dtype == jnp.float32:
        experts.router.kernel[...] = 50 * experts.router.kernel[...]
        experts.gate_up.kernel[...] = 20 * experts.gate_up.kernel[...]
        experts.down.kernel[...] = 20 * experts.down.kernel[...]
    return experts


def tokens(count: int = TOKENS, dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).standard_normal((count, HIDDEN)).astype(dtype))


def by_hand(experts: ExpertsMLP, x: jax.Array, normalised: bool) -> np.ndarray:
    rows = np.asarray(x, np.float64)
    scores = rows @ np.asarray(kernel_values(experts.router.kernel), np.float64)
    probabilities = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    gate_up, down = (np.asarray(kernel[...], np.float64) for kernel in (experts.gate_up.kernel, experts.down.kernel))
    out = np.zeros_like(rows)
    for token, row in enumerate(rows):
        picked = np.argsort(-probabilities[token])[:PICKED]
        total = probabilities[token, picked].sum() if normalised else 1.0
        for expert in picked:
            gate, up = np.split(row @ gate_up[expert], 2)
            out[token] += probabilities[token, expert] / total * ((gate / (1 + np.exp(-gate)) * up) @ down[expert])
    return out


@pytest.mark.parametrize("normalised", [True, False])
def test_both_ways_equal_a_loop_over_tokens_and_experts(normalised):
    experts, x = layer(normalised=normalised), tokens()
    weights, picked = experts.route(x)
    assert len({tuple(sorted(row)) for row in np.asarray(picked).tolist()}) > 2
    expected = by_hand(experts, x, normalised)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(experts.by_gathering(x, weights, picked), expected, atol=1e-5)
    np.testing.assert_allclose(experts.over_all(x, weights, picked), expected, atol=1e-5)
    np.testing.assert_allclose(experts(x), expected, atol=1e-5)


def test_every_token_may_want_the_same_experts():
    experts = layer()
    x = jnp.broadcast_to(tokens(1), (TOKENS, HIDDEN))
    np.testing.assert_allclose(experts(x), np.repeat(by_hand(experts, x[:1], True), TOKENS, axis=0), atol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 3, TOKENS])
def test_a_token_does_not_depend_on_the_others(count):
    """1 and 2 tokens gather kernels (fewer than 6 pairs). 3 tokens and more run all experts."""
    experts, x = layer(), tokens()
    np.testing.assert_allclose(experts(x[:count]), experts(x)[:count], atol=1e-5)


def test_an_expert_that_overflows_harms_only_the_tokens_that_picked_it():
    experts, x = layer(), tokens()
    _, picked = experts.route(x)
    broken = int(picked[0, 0])
    spared = ~np.any(np.asarray(picked) == broken, axis=1)
    assert spared.any()
    healthy = np.asarray(experts(x))
    experts.gate_up.kernel[...] = experts.gate_up.kernel[...].at[broken].set(jnp.inf)
    harmed = np.asarray(experts(x))
    np.testing.assert_array_equal(harmed[spared], healthy[spared])
    assert not np.isfinite(harmed[~spared]).all()


@pytest.mark.parametrize(("platform", "stored"), [(CPU, jnp.uint16), (TPU, jnp.bfloat16)])
def test_bfloat16_kernels_give_both_ways_the_same_result(platform, stored):
    experts, x = layer(dtype=jnp.bfloat16, platform=platform), tokens(dtype=jnp.bfloat16)
    weights, picked = experts.route(x)
    gathered, over_all = experts.by_gathering(x, weights, picked), experts.over_all(x, weights, picked)
    np.testing.assert_allclose(gathered, over_all, rtol=0.05, atol=1e-6)
    assert experts(x).dtype == jnp.bfloat16
    assert experts.down.kernel.dtype == stored
