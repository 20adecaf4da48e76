"""Qwen3 and Llama targets against recorded outputs of transformers: logits, every tap, padded batches, greedy text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.target_oracle import TargetChecks, TargetOracle

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module", params=["qwen3_tied", "llama_untied_llama3rope"])
def oracle(request: pytest.FixtureRequest, data_dir: Path) -> TargetOracle:
    return TargetOracle.load(data_dir / "E_targets" / request.param)


class TestDenseTargets(TargetChecks):
    """The recorded models: a tied head, and an untied one with Llama 3's rotation."""
