"""The Qwen3 mixture-of-experts target against recorded outputs of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark_jax.speculators_common.numerics.matmul import kernel_values
from tests.support.target_oracle import TargetChecks, TargetOracle

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def oracle(data_dir: Path) -> TargetOracle:
    return TargetOracle.load(data_dir / "E_targets" / "qwen3_moe")


class TestQwen3Moe(TargetChecks):
    """The recorded model: 4 experts, 2 per token, layer 1 dense."""


def test_experts_are_where_the_config_says(oracle: TargetOracle) -> None:
    assert oracle.target.config.layer_is_sparse == (True, False, True, True, True, True)
    assert [kernel_values(layer.mlp.down.kernel).shape for layer in oracle.target.layers[:2]] == [
        (4, 24, 64),
        (128, 64),
    ]


def test_a_row_decoded_alone_gathers_its_experts_and_says_the_same(oracle: TargetOracle) -> None:
    """One token has two pairs, fewer than the four experts. The batches of the other tests run all experts."""
    request = oracle.requests[1]
    (alone,) = oracle.generate(None, [request], batch_size=1)
    assert alone.output_ids == oracle.plain[1].output_ids
