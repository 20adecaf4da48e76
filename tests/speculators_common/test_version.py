"""The version has one source, `pyproject.toml`."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import dspark_jax
from dspark_jax.pipelines.bench.machine import this_machine
from dspark_jax.speculators_common import version as module
from dspark_jax.speculators_common.version import version
from tests.support.text_pair import dspark


def test_everybody_states_the_version_of_the_project_file(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "dynamic" not in project
    assert version() == dspark_jax.__version__ == this_machine().dspark_jax == project["version"]
    assert dspark(capsys, "--version").out == f"{project['name']} {project['version']}\n"


def test_sources_that_are_not_installed_have_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DISTRIBUTION", "dspark-jax-that-nobody-installed")
    assert version() == dspark_jax.__version__ == "unknown"
