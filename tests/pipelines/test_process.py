"""Signals end the command at every moment, without a word, and nothing half written stays behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals as on POSIX systems")

BEGIN = "from dspark_jax.pipelines.process import leave_at_signals\nleave_at_signals()\nprint(1, flush=True)\n"
IMPORT = "import jax\nwhile True: pass"
COMPILED_CODE = "import hashlib\nhashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"  # minutes between two instructions


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Make the signals work: what a shell starts in the background ignores interrupts, what `nohup` starts ignores
    SIGHUP, and so do their children.
    """
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    hang_up = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGHUP, hang_up)


@contextlib.contextmanager
def _process(body: str) -> Iterator[subprocess.Popen[str]]:
    """A process that handles signals and then runs `body`. It is killed if the test fails."""
    with subprocess.Popen(
        [sys.executable, "-c", BEGIN + body], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "1\n"
            yield process
        finally:
            process.kill()


def _end(body: str, number: int, *, after: float = 0.0) -> tuple[int, str]:
    """Exit status and stderr of a process that gets a signal some seconds after it has begun."""
    with _process(body) as process:
        assert process.stderr is not None
        time.sleep(after)
        process.send_signal(number)
        return process.wait(60), process.stderr.read()


@pytest.mark.parametrize("after", [0.0, 0.1, 0.4, 1.0])
def test_an_interrupt_while_modules_are_imported(after: float) -> None:
    assert _end(IMPORT, signal.SIGINT, after=after) == (130, "")


def test_an_interrupt_while_compiled_code_runs() -> None:
    assert _end(COMPILED_CODE, signal.SIGINT, after=0.2) == (130, "")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_what_is_half_written_is_removed(tmp_path: Path, number: int, status: int) -> None:
    body = (
        "from dspark_jax.speculators_common.files.atomic_directory import new_directory\n"
        f"with new_directory({str(tmp_path / 'out')!r}) as fresh:\n"
        "    (fresh / 'file').write_text('x')\n"
        "    print(fresh.exists(), flush=True)\n"
        "    while True: pass\n"
    )
    with _process(body) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "True\n"
        assert len(list(tmp_path.iterdir())) == 1
        process.send_signal(number)
        assert process.wait(60) == status
        assert process.stderr.read() == ""
    assert list(tmp_path.iterdir()) == []


def test_an_ignored_signal_stays_ignored() -> None:
    """As under `nohup`."""
    code = (
        "import os, signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        f"{BEGIN}os.kill(os.getpid(), signal.SIGHUP)\nprint(2)"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "1\n2\n", "")


def test_a_closed_stream_is_the_null_device() -> None:
    """What is for stderr must not come out on stdout, and no file may take the place of a stream."""
    code = (
        "from dspark_jax.pipelines.process import open_missing_streams\nopen_missing_streams()\nimport os, sys\n"
        "print('to stderr', file=sys.stderr)\nprint(os.open(os.devnull, os.O_RDONLY), repr(sys.stdin.read()))"
    )
    finished = subprocess.run(
        ["sh", "-c", '"$0" -c "$1" <&- 2>&-', sys.executable, code], capture_output=True, check=False, timeout=60
    )
    assert (finished.returncode, finished.stdout) == (0, b"3 ''\n")
    command = ["sh", "-c", '"$0" -c "$1" >&-', sys.executable, code]
    finished = subprocess.run(command, capture_output=True, check=False, timeout=60, stdin=subprocess.DEVNULL)
    assert (finished.returncode, finished.stderr) == (0, b"to stderr\n")
