"""The check that every recorded tensor is read by a test: what it finds, and when it may say something."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.recorded_tensors import FILE_NAME, UNREAD, RecordedTensors, faults, load_recorded, recorded_names

ROOT = Path(__file__).parents[1]
WORKERS = ("-p", "xdist.plugin", "-n", "2", "--dist", "loadfile")

CONFTEST = """
from pathlib import Path
from tests.support.recorded_tensors import ReadingCheck
HERE = Path(__file__).parent
def pytest_configure(config):
    config.pluginmanager.register(ReadingCheck(HERE / "data", HERE, {"set/*:later.*": "comes later"}))
"""
READER = """
from pathlib import Path
import pytest
from tests.support.recorded_tensors import load_recorded
@pytest.mark.parametrize("name", {names})
def test_reads(name):
    assert load_recorded(Path(__file__).parent / "data" / "set" / "one")[name].shape == (2,)
"""


def _suite(folder: Path, *names_by_file: list[str]) -> Path:
    """A suite of two test files over one record of four tensors."""
    record = folder / "data" / "set" / "one"
    record.mkdir(parents=True)
    save_file({name: np.zeros(2, np.float32) for name in ("a", "b", "c", "later.x")}, record / FILE_NAME)
    (folder / "conftest.py").write_text(CONFTEST)
    for number, names in enumerate(names_by_file):
        (folder / f"test_{number}.py").write_text(READER.format(names=names))
    return folder


def _run(folder: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "--import-mode=importlib", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("workers", [(), WORKERS], ids=["one process", "two workers"])
def test_a_whole_run_fails_for_a_tensor_that_no_test_reads(tmp_path: Path, workers: tuple[str, ...]) -> None:
    if workers:
        pytest.importorskip("xdist")
    status, output = _run(_suite(tmp_path, ["a"], ["a", "c"]), *workers)
    assert (status, "set/one:b: recorded, but no test reads it" in output) == (1, True), output


def test_a_whole_run_that_reads_all_passes(tmp_path: Path) -> None:
    """In workers, none of which reads all."""
    pytest.importorskip("xdist")
    status, output = _run(_suite(tmp_path, ["a", "b"], ["b", "c"]), *WORKERS)
    assert (status, "recorded tensors: 3 read, all others listed as unread" in output) == (0, True), output


def test_a_run_of_a_part_checks_nothing(tmp_path: Path) -> None:
    suite = _suite(tmp_path, ["a"], ["b"])
    for part in (("test_0.py",), ("-k", "test_0"), ("--deselect", "test_1.py::test_reads[b]")):
        status, output = _run(suite, *part)
        assert status == 0, output
        assert "recorded tensors: not checked, as only a part of the suite ran" in output


def test_thorough_tests_may_be_left_out_of_a_checked_run(tmp_path: Path) -> None:
    suite = _suite(tmp_path, ["a", "b"], ["c"])
    (suite / "test_2.py").write_text(
        "import pytest\n@pytest.mark.thorough\ndef test_more():\n    raise AssertionError\n"
    )
    status, output = _run(suite, "-m", "not thorough")
    assert (status, "recorded tensors: 3 read" in output) == (0, True), output


def test_faults_name_what_is_unread_and_what_is_listed_in_vain() -> None:
    recorded = {"x:a", "x:b", "y:grad.w"}
    assert faults(recorded, {"x:a", "x:b"}, {"y:grad.*": "later"}) == []
    assert faults(recorded, {"x:a"}, {"y:grad.*": "later"}) == ["x:b: recorded, but no test reads it"]
    assert faults(recorded, {"x:a", "x:b", "y:grad.w"}, {"y:grad.*": "later", "z:*": "gone"}) == [
        "y:grad.*: listed as unread, but a test reads y:grad.w",
        "z:*: listed as unread, but no recorded tensor has such a name",
    ]


def test_the_names_are_those_of_every_record(data_dir: Path) -> None:
    names = recorded_names(data_dir)
    folders = {name.partition(":")[0] for name in names}
    assert {folder.partition("/")[0] for folder in folders} == {
        "A_deepspec_qwen3",
        "B_deepspec_gemma4",
        "C_speculators",
        "D_loop",
        "E_targets",
        "G_verification",
        "H_compact",
    }
    for folder in folders:
        record = load_recorded(data_dir / folder)
        assert {f"{folder}:{name}" for name in record} == {name for name in names if name.startswith(f"{folder}:")}
    assert all(reason for reason in UNREAD.values())


def test_a_record_is_read_by_name_only(data_dir: Path) -> None:
    record = load_recorded(data_dir / "D_loop")
    assert isinstance(record, RecordedTensors)
    assert record.get("no such tensor") is None
    for read_all in (record.items, record.values):
        with pytest.raises(TypeError, match="recorded tensors are read by name"):
            read_all()


def test_every_test_loads_records_by_the_helper_that_notes_what_is_read() -> None:
    others = [
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "tests").rglob("*.py")
        if FILE_NAME in file.read_text() and file.name != "recorded_tensors.py"
    ]
    assert others == []
