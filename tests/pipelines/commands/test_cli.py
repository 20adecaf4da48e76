"""The command around the subcommands: bounded error lines, closed streams, signals."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from dspark_jax.pipelines import cli
from tests.support import text_pair
from tests.support.text_pair import RecordedPair

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def pair(data_dir: Path) -> RecordedPair:
    return text_pair.recorded_pair(data_dir)


@pytest.mark.parametrize(
    "arguments", [["info", "--" + "f" * 5000], ["c" * 5000], ["convert", "", "out", "--to", "deepspec"]]
)
def test_a_wrong_argument_is_one_line_of_bounded_length(capsys: Capture, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    error = capsys.readouterr().err
    assert (ended.value.code, error.count("\n")) == (2, 1)
    assert len(error) < 2100


def test_closed_streams_are_no_traceback(capsys: Capture, pair: RecordedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert cli.main(["generate", "--target", str(pair.target), "--raw", "--prompt", "-"]) == 2
    assert "--prompt -: found a closed stdin, allowed text" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["info", str(pair.target)]) == 0


@pytest.mark.skipif(os.name != "posix", reason="signals as on POSIX systems")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_leaves_no_half_written_directory(
    pair: RecordedPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    number = getattr(signal, name)

    def signalled(*_: Any) -> None:
        os.kill(os.getpid(), number)
        raise AssertionError("the signal ends the write before this line")

    before = signal.getsignal(number)
    monkeypatch.setattr("dspark_jax.pipelines.checkpoints.conversion.write_safetensors", signalled)
    with pytest.raises(SystemExit) as ended:
        cli.main(["convert", str(pair.draft), str(tmp_path / "out"), "--to", "speculators"])
    assert ended.value.code == 128 + number
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(number) is before
