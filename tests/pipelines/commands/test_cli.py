"""The command around the subcommands: bounded error lines, closed streams."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dspark_jax.pipelines import cli
from tests.support import text_pair
from tests.support.text_pair import RecordedPair

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def pair(data_dir: Path) -> RecordedPair:
    return text_pair.recorded_pair(data_dir)


def test_a_number_of_400_digits_is_one_line(pair: RecordedPair, capsys: Capture) -> None:
    assert cli.main(["generate", "--target", str(pair.target), "--prompt-ids", "1", "--batch-size", "9" * 400]) == 2
    error = capsys.readouterr().err
    assert error.startswith("dspark: error: --batch-size: found 999")
    assert error.endswith("allowed 1..2147483647\n")


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
