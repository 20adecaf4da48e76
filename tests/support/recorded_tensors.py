"""The recorded tensors of the references, and which of them the tests read.

Tests load a record with `load_recorded`, which notes every name that is asked for. A run of the whole suite fails where
a tensor of `tests/data` was asked for by no test and is not in `UNREAD`, or stands there although it was read. A run of
a part of the suite checks nothing and says so. With xdist the workers hand in what they read.
"""

from __future__ import annotations

import fnmatch
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from safetensors.numpy import load_file

FILE_NAME = "expected.safetensors"
_TRAINING = "training this family comes later, and nothing in the code computes it yet"

# "<folder below tests/data>:<tensor>" as a pattern -> why no test reads it.
UNREAD: dict[str, str] = {
    "C_speculators/*:*.in.loss_mask": _TRAINING,
    "C_speculators/*:*.aligned_loss_mask": _TRAINING,
    "C_speculators/*:*.anchor_valid": "marks the anchors that are trained: " + _TRAINING,
    "C_speculators/*:*.loss.*": _TRAINING,
    "C_speculators/*:*.metric.*": _TRAINING,
    "C_speculators/*:*.grad.*": _TRAINING,
    "C_speculators/*:*.grad_norm.*": _TRAINING,
}

_read: set[tuple[str, str]] = set()  # (file, tensor), in this process


class RecordedTensors(dict[str, np.ndarray]):
    """The tensors of one record by name. Asking for one counts as reading it; asking for all at once is refused, as
    that says nothing about what is compared.
    """

    def __init__(self, file: Path) -> None:
        super().__init__(load_file(file))
        self._file = str(file.resolve())

    def __getitem__(self, name: str) -> np.ndarray:
        tensor = super().__getitem__(name)
        _read.add((self._file, name))
        return tensor

    def get(self, name: str, default: Any = None) -> Any:
        """As of a dict; a name that is there counts as read."""
        if name not in self:
            return default
        return self[name]

    def items(self) -> NoReturn:
        """Refused."""
        raise TypeError("recorded tensors are read by name")

    def values(self) -> NoReturn:
        """Refused."""
        raise TypeError("recorded tensors are read by name")


def load_recorded(folder: Path) -> RecordedTensors:
    """What the reference recorded for the checkpoint in `folder`."""
    return RecordedTensors(folder / FILE_NAME)


def recorded_names(data_dir: Path) -> set[str]:
    """`"<folder>:<tensor>"` of every recorded tensor below `data_dir`, from the headers of the files."""
    return {
        f"{file.parent.relative_to(data_dir).as_posix()}:{name}"
        for file in data_dir.rglob(FILE_NAME)
        for name in _header(file)
        if name != "__metadata__"
    }


def _header(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header: dict[str, Any] = json.loads(stream.read(length))
    return header


def faults(recorded: Iterable[str], read: Iterable[str], unread: Mapping[str, str]) -> list[str]:
    """One line for each tensor that nothing read and no pattern of `unread` names, and for each pattern that names none
    or one that was read.
    """
    recorded, read = set(recorded), set(read)
    named = {pattern: set(fnmatch.filter(recorded, pattern)) for pattern in unread}
    missing = recorded - read - set().union(*named.values())
    lines = [f"{name}: recorded, but no test reads it" for name in sorted(missing)]
    for pattern, names in named.items():
        if not names:
            lines.append(f"{pattern}: listed as unread, but no recorded tensor has such a name")
        elif names & read:
            lines.append(f"{pattern}: listed as unread, but a test reads {min(names & read)}")
    return lines


class ReadingCheck:
    """A pytest plugin: the check at the end of a run of all test files below `tests_dir` that passed."""

    def __init__(self, data_dir: Path, tests_dir: Path, unread: Mapping[str, str]) -> None:
        self._data_dir, self._tests_dir, self._unread = data_dir.resolve(), tests_dir.resolve(), unread
        self._files: set[str] = set()  # with tests that were collected, over all processes
        self._deselected = False
        self._all_read: set[tuple[str, str]] = set()
        self._lines: list[str] = []

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Note what was collected and does not run. Thorough tests may be left out, so they are not the only ones that
        read a tensor.
        """
        thorough = [item for item in items if item.get_closest_marker("thorough")]
        self._files |= {str(item.path.resolve()) for item in thorough}
        self._deselected |= len(thorough) < len(items)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note the files that run."""
        self._files |= {str(item.path.resolve()) for item in session.items}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take in what a worker of xdist read."""
        report = getattr(node, "workeroutput", {}).get("recorded_tensors")
        if report is not None:
            self._files |= set(report["files"])
            self._deselected |= report["deselected"]
            self._all_read |= {(file, name) for file, name in report["read"]}

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """A worker hands in what it read; the process that reports decides."""
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["recorded_tensors"] = {
                "files": sorted(self._files),
                "deselected": self._deselected,
                "read": sorted(_read),
            }
            return
        self._all_read |= _read
        if exitstatus != pytest.ExitCode.OK or session.config.option.collectonly:
            return
        if self._deselected or set(self._test_files()) - self._files:
            self._lines = ["recorded tensors: not checked, as only a part of the suite ran"]
            return
        read = set(self._names_below_data(self._all_read))
        self._lines = faults(recorded_names(self._data_dir), read, self._unread)
        if self._lines:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        else:
            self._lines = [f"recorded tensors: {len(read)} read, all others listed as unread"]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """What was found."""
        for line in self._lines:
            terminalreporter.write_line(line)

    def _test_files(self) -> Iterator[str]:
        return (str(file) for file in self._tests_dir.rglob("test_*.py"))

    def _names_below_data(self, read: Iterable[tuple[str, str]]) -> Iterator[str]:
        for file, name in read:
            folder = Path(file).parent
            if folder.is_relative_to(self._data_dir):
                yield f"{folder.relative_to(self._data_dir).as_posix()}:{name}"
