"""Gemma 3 against recorded outputs of transformers, and the embedding and head that drafts use."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.target_oracle import TargetChecks, TargetOracle

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def oracle(data_dir: Path) -> TargetOracle:
    return TargetOracle.load(data_dir / "E_targets" / "gemma3_text")


class TestGemma3(TargetChecks):
    """The recorded model: sliding and full layers, a scaled full rotation, an attention scale other than hd ** -0.5."""


def test_norms_multiply_by_one_plus_the_stored_gain(oracle: TargetOracle, data_dir: Path) -> None:
    """The one is added when the norm runs. A stored sum would have lost bits of the weight."""
    stored = load_file(data_dir / "E_targets" / "gemma3_text" / "model.safetensors")
    norms = {
        "model.norm.weight": oracle.target.norm,
        "model.layers.2.self_attn.q_norm.weight": oracle.target.layers[2].attention.query_norm,
    }
    for name, norm in norms.items():
        gain = 1 + stored[name]
        ones = jnp.ones((1, gain.shape[0]), jnp.float32)
        np.testing.assert_allclose(norm(ones)[0] * np.sqrt(1 + norm.epsilon), gain, rtol=1e-6)


def test_the_embedding_is_lent_raw_and_scaled_inside(oracle: TargetOracle, data_dir: Path) -> None:
    rows = load_file(data_dir / "E_targets" / "gemma3_text" / "model.safetensors")["model.embed_tokens.weight"]
    ids = oracle.expected["input_ids"]
    np.testing.assert_array_equal(oracle.target.embed_tokens(jnp.asarray(ids)), rows[ids])
    np.testing.assert_array_equal(oracle.full_run[1][:, :, 0], rows[ids] * np.float32(8))


def test_the_window_and_the_scale_count(oracle: TargetOracle) -> None:
    """The recorded text is longer than the window of 8, and the scale is 24 ** -0.5 with heads of 16."""
    config = oracle.target.config
    assert config.layer_windows == (8, 8, None, 8, 8, None)
    assert {layer.attention.scale for layer in oracle.target.layers} == {24**-0.5}
    assert (config.rope.kind, config.rope.factor, config.sliding_rope.kind) == ("linear", 8.0, "default")
