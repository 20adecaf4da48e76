"""Gemma 4 against recorded outputs of transformers.

The models have values that are keys (12B), shared keys and values and per-layer inputs (E2B), and the multimodal
layout.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark_jax.architectures.nn.attention.kv_cache import KVPages
from dspark_jax.pipelines.checkpoints.loading import load_target
from dspark_jax.speculators_common.numerics.matmul import kernel_values
from tests.support.recorded_tensors import load_recorded
from tests.support.target_oracle import PAGE_SIZE, TargetChecks, TargetOracle

pytestmark = pytest.mark.usefixtures("quick_compilation")

FOLDERS = ["gemma4_text_12b_like", "gemma4_text_e2b_like", "gemma4_unified_multimodal_layout"]


@pytest.fixture(scope="module", params=FOLDERS)
def oracle(request: pytest.FixtureRequest, data_dir: Path) -> TargetOracle:
    return TargetOracle.load(data_dir / "E_targets" / request.param)


class TestGemma4(TargetChecks):
    """The recorded models."""


@pytest.fixture(scope="module")
def e2b(data_dir: Path) -> TargetOracle:
    return TargetOracle.load(data_dir / "E_targets" / "gemma4_text_e2b_like")


def test_tables_are_lent_raw_and_scaled_and_capped_inside(data_dir: Path) -> None:
    folder = data_dir / "E_targets" / "gemma4_text_12b_like"
    oracle, rows = TargetOracle.load(folder), load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    ids, hidden = oracle.expected["input_ids"], oracle.full_run[0]
    np.testing.assert_array_equal(oracle.target.embed_tokens(jnp.asarray(ids)), rows[ids])
    np.testing.assert_array_equal(oracle.full_run[1][:, :, 0], rows[ids] * np.float32(8))
    raw = np.asarray(hidden) @ rows.T
    np.testing.assert_allclose(oracle.target.lm_head(hidden), raw, rtol=0, atol=2e-4)
    np.testing.assert_allclose(oracle.target.compute_logits(hidden), 30 * np.tanh(raw / 30), rtol=0, atol=2e-4)


def test_layers_have_pools_of_their_own_geometry(data_dir: Path) -> None:
    target = load_target(data_dir / "E_targets" / "gemma4_text_12b_like", jnp.float32).module
    params = target.kv_params(PAGE_SIZE)
    assert params.layer_shapes == ((2, 16), (1, 32), (2, 16), (2, 16), (1, 32), (1, 32))
    assert params.bytes_per_page() == 2 * 6 * 32 * PAGE_SIZE * 4
    pages = KVPages.zeros(params, 3)
    assert [keys.shape for keys, _ in pages.layers] == [
        (3, heads, PAGE_SIZE, head_dim) for heads, head_dim in params.layer_shapes
    ]
    assert params.bytes_per_page() == sum(pool.nbytes for pool in jax.tree.leaves(pages)) // 3


def test_layers_that_share_keys_and_values_store_none(e2b: TargetOracle) -> None:
    """The last two layers have full attention and read the keys and values of layer 1, the last full layer before them.

    Their feed-forward part is twice as wide.
    """
    target = e2b.target
    assert target.kv_params(PAGE_SIZE).layer_shapes == ((2, 16), (2, 32), (2, 16), (2, 16))
    assert [layer.attention.shape.cache_layer for layer in target.layers] == [0, 1, 2, 3, 1, 1]
    assert [kernel_values(layer.mlp.down.kernel).shape[0] for layer in target.layers] == [48, 48, 48, 48, 96, 96]
    assert [layer.attention.key_norm is None for layer in target.layers] == [False, False, False, False, True, True]


def test_a_layer_s_own_input_counts(e2b: TargetOracle) -> None:
    """Without the gate the output of the layer differs, so the recorded states test the layer's own input."""
    layer = e2b.target.layers[2]
    x = jnp.asarray(e2b.expected["hidden_states.2"]).reshape(-1, 64)
    inputs = e2b.target.per_layer_inputs(
        e2b.full_batch().tokens, jnp.asarray(e2b.expected["hidden_states.0"]).reshape(-1, 64)
    )
    assert inputs.shape == (40, 6, 8)
    assert float(jnp.max(jnp.abs(layer.per_layer_gate(x, inputs[:, 2]) - x))) > 0.1


@pytest.mark.parametrize("folder", FOLDERS)
def test_bfloat16_parameters_of_every_geometry_load_and_run(folder: str, data_dir: Path) -> None:
    oracle = TargetOracle(
        load_target(data_dir / "E_targets" / folder, jnp.bfloat16),
        load_recorded(data_dir / "E_targets" / folder),
    )
    hidden, taps = oracle.full_run
    assert (hidden.dtype, taps.dtype) == (jnp.float32, jnp.float32)  # the stream is never rounded
    logits = oracle.target.compute_logits(hidden)
    assert logits.dtype == jnp.float32
    agreement = np.mean(np.argmax(logits, axis=-1) == np.argmax(oracle.expected["logits"], axis=-1))
    assert agreement > 0.9
