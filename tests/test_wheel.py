"""The wheel: it holds the modules of the checkout and runs where the checkout is not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support import import_graph

ROOT = Path(__file__).parents[1]
BUILD_INPUTS = ("pyproject.toml", "README.md", "LICENSE", "src", *import_graph.ROOMS)

pytestmark = pytest.mark.thorough


def _run(command: list[str | Path], *, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run as a user would: no path to the checkout, none of this test run's flags."""
    environment = {
        name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME", "XLA_FLAGS"}
    }
    return subprocess.run(
        command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def _succeed(command: list[str | Path], *, cwd: Path) -> str:
    finished = _run(command, cwd=cwd)
    assert finished.returncode == 0, f"{finished.stdout}\n{finished.stderr}"
    return finished.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that neither left-overs of an earlier build get in nor new ones into the checkout."""
    checkout = tmp_path_factory.mktemp("checkout")
    for name in BUILD_INPUTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(
                source, checkout / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
            )
        else:
            shutil.copy(source, checkout / name)
    _succeed([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist"], cwd=checkout)
    (built,) = (checkout / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment that holds the wheel; third-party packages are those of the running
    environment, nothing is downloaded.

    A folder named in a `.pth` file comes after the environment's own packages, and `.pth` files inside it are not read:
    an editable install of this project in the running environment stays out of sight.
    """
    environment = tmp_path_factory.mktemp("installed")
    venv.create(environment, with_pip=False)
    purelib = Path(sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)}))
    borrowed = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    (purelib / "borrowed.pth").write_text("".join(f"{folder}\n" for folder in borrowed), encoding="utf-8")
    folder = Path(sysconfig.get_path("scripts", vars={"base": str(environment)}))
    _succeed(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            folder / "python",
            "install",
            "--no-deps",
            "--no-index",
            "--ignore-installed",
            wheel,
        ],
        cwd=environment,
    )
    return folder


def test_the_wheel_holds_the_modules_of_the_checkout(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [Path(name) for name in archive.namelist()]
    modules = [
        ".".join((name.parent if name.name == "__init__.py" else name.with_suffix("")).parts)
        for name in names
        if name.suffix == ".py"
    ]
    assert sorted(modules) == sorted(import_graph.read_tree(ROOT / "src" / import_graph.PACKAGE))


def test_the_wheel_holds_the_type_marker_and_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    assert "dspark_jax/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.11" in metadata


def test_the_installed_package_is_the_wheels(installed: Path, tmp_path: Path) -> None:
    where = _succeed([installed / "python", "-c", "import dspark_jax.pipelines as p; print(p.__file__)"], cwd=tmp_path)
    assert Path(where.strip()).resolve().is_relative_to(installed.parent.resolve())


def test_the_installed_command_describes_a_draft(installed: Path, data_dir: Path, tmp_path: Path) -> None:
    text = _succeed([installed / "dspark", "info", data_dir / "D_loop" / "draft"], cwd=tmp_path)
    assert "Qwen3DSparkModel" in text


def test_the_installed_command_generates_with_a_pair(installed: Path, data_dir: Path, tmp_path: Path) -> None:
    pair = data_dir / "D_loop"
    text = _succeed(
        [
            installed / "dspark",
            "generate",
            "--target",
            pair / "target",
            "--draft",
            pair / "draft",
            "--prompt-ids",
            "5,17,3",
            "--json",
        ],
        cwd=tmp_path,
    )
    results = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert len(results) == 1
    assert results[0]["output_ids"]
    assert all(isinstance(token, int) for token in results[0]["output_ids"])


def test_python_dash_m_is_the_same_command(installed: Path, data_dir: Path, tmp_path: Path) -> None:
    arguments: list[str | Path] = ["info", data_dir / "D_loop" / "draft"]
    as_module = _succeed([installed / "python", "-m", "dspark_jax", *arguments], cwd=tmp_path)
    assert as_module == _succeed([installed / "dspark", *arguments], cwd=tmp_path)
