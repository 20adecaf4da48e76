"""A directory is written completely or not at all, whatever interrupts the writing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dspark_jax.speculators_common.errors import DSparkError
from dspark_jax.speculators_common.files import atomic_directory
from dspark_jax.speculators_common.files.atomic_directory import new_directory, replaced_directory

FILES = ("a", "b")


def write(directory: Path, text: str) -> None:
    with replaced_directory(directory, replaceable=FILES) as fresh:
        for name in FILES:
            (fresh / name).write_text(text)


def content(directory: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in directory.iterdir()}


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_directory_is_made_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool) -> None:
    if not can_exchange:
        monkeypatch.setattr(atomic_directory, "_exchanged", lambda fresh, final: False)
    directory = tmp_path / "deep" / "draft"
    for text in ("first", "second"):
        write(directory, text)
        assert content(directory) == {"a": text, "b": text}
        assert [entry.name for entry in directory.parent.iterdir()] == ["draft"]
    assert directory.stat().st_mode & 0o700 == 0o700


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="two directories are exchanged in one step on Linux")
def test_on_linux_the_old_directory_is_exchanged_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "draft", "first")
    steps: list[bool] = []
    exchange = atomic_directory._exchanged

    def recorded(fresh: Path, final: Path) -> bool:
        steps.append(exchange(fresh, final))
        return steps[-1]

    monkeypatch.setattr(atomic_directory, "_exchanged", recorded)
    write(tmp_path / "draft", "second")
    assert steps == [True]


def test_a_failure_while_writing_leaves_the_old_directory_whole(tmp_path: Path) -> None:
    write(tmp_path / "draft", "first")

    def write_half() -> None:
        with replaced_directory(tmp_path / "draft", replaceable=FILES) as fresh:
            (fresh / "a").write_text("second")
            raise OSError("disk full")

    with pytest.raises(DSparkError, match="disk full"):
        write_half()
    assert content(tmp_path / "draft") == {"a": "first", "b": "first"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["draft"]


def test_a_failing_second_rename_brings_the_old_directory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "draft", "first")
    monkeypatch.setattr(atomic_directory, "_exchanged", lambda fresh, final: False)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.suffix == ".saving":
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(DSparkError, match="no"):
        write(tmp_path / "draft", "second")
    assert content(tmp_path / "draft") == {"a": "first", "b": "first"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["draft"]


KILLED = """
import os, signal, sys
from dspark_jax.speculators_common.files.atomic_directory import new_directory, replaced_directory
with replaced_directory(sys.argv[1], replaceable=("a", "b")) as fresh:
    (fresh / "a").write_text("second")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_the_old_directory_whole(tmp_path: Path) -> None:
    write(tmp_path / "draft", "first")
    source = Path(__file__).parents[3] / "src"
    environment = {**os.environ, "PYTHONPATH": str(source)}
    finished = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "draft")], env=environment, capture_output=True, check=False
    )
    assert finished.returncode == -signal.SIGKILL, finished.stderr
    assert content(tmp_path / "draft") == {"a": "first", "b": "first"}
    write(tmp_path / "draft", "third")
    assert content(tmp_path / "draft") == {"a": "third", "b": "third"}


def test_a_directory_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(
        DSparkError, match=r"found notes.txt in it, allowed a new directory or one with nothing but a, b"
    ):
        write(tmp_path, "text")
    with pytest.raises(DSparkError, match=r"notes.txt: is a file, allowed a directory"):
        write(tmp_path / "notes.txt", "text")
    assert content(tmp_path) == {"notes.txt": "mine"}


def test_a_link_is_followed(tmp_path: Path) -> None:
    write(tmp_path / "real", "first")
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "link", "second")
    assert (tmp_path / "link").is_symlink()
    assert content(tmp_path / "real") == {"a": "second", "b": "second"}


def test_a_new_directory_appears_whole(tmp_path: Path) -> None:
    with new_directory(tmp_path / "deep" / "draft") as fresh:
        (fresh / "a").write_text("first")
        assert not (tmp_path / "deep" / "draft").exists()
    assert content(tmp_path / "deep" / "draft") == {"a": "first"}
    assert [entry.name for entry in (tmp_path / "deep").iterdir()] == ["draft"]


def test_whoever_may_read_other_new_files_may_read_these(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    with new_directory(tmp_path / "draft") as fresh:
        (fresh / "a").touch(mode=0o600)
    assert (tmp_path / "draft" / "a").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_new_directory_whose_writing_fails_never_appears(tmp_path: Path) -> None:
    def write_half() -> None:
        with new_directory(tmp_path / "draft") as fresh:
            (fresh / "a").write_text("first")
            raise OSError("disk full")

    with pytest.raises(DSparkError, match="disk full"):
        write_half()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["empty directory", "directory", "file", "broken link"])
@pytest.mark.parametrize("early", [True, False])
def test_a_new_directory_takes_the_place_of_nothing(tmp_path: Path, kind: str, early: bool) -> None:
    final = tmp_path / "draft"

    def occupy() -> None:
        if kind == "file":
            final.write_text("mine")
        elif kind == "broken link":
            final.symlink_to("nowhere")
        else:
            final.mkdir()
            if kind == "directory":
                (final / "mine").touch()

    def write_new() -> None:
        with new_directory(final) as fresh:
            (fresh / "a").write_text("first")
            occupy()  # while it is written

    if early:
        occupy()
    with pytest.raises(DSparkError, match=r"draft: exists already, allowed a path where nothing is"):
        write_new()
    assert [entry.name for entry in tmp_path.iterdir()] == ["draft"]
    assert not (final / "a").exists()
