"""Prepares the process of the command line: its streams, and how signals end it.

An exception at Ctrl-C would have to pass through compiled code, and JAX crashes or goes on when one arises in its
callbacks. So the process leaves at once: what it has half written is removed, nothing is unwound. This module imports
nothing that takes time, because it is the first one that the command runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
_PATIENCE = 1.0  # seconds that the main thread has: it can act only between two instructions of Python
_ATOMIC = "dspark_jax.speculators_common.files.atomic_directory"


def open_missing_streams() -> None:
    """Open the null device as stdin, stdout or stderr where the caller closed it.

    Otherwise the next file that is opened would take its place, and Python would print what is for stderr on stdout.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the smallest free number, which is this one
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))


def leave_at_signals() -> None:
    """From now on the signals end the process with status 128 + number, without a word. Ignored ones stay ignored."""
    numbers = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
    numbers = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    if os.name == "posix":
        # The main thread may compile for a minute; another thread learns of the signal at once.
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=_leave_if_the_main_thread_does_not, args=(reader,), daemon=True).start()
    for number in numbers:
        signal.signal(number, lambda number, _: _leave(number))


def _leave_if_the_main_thread_does_not(reader: int) -> None:
    number = os.read(reader, 1)[0]
    time.sleep(_PATIENCE)
    _leave(number)


def _leave(number: int) -> None:
    with contextlib.suppress(Exception):
        if (atomic := sys.modules.get(_ATOMIC)) is not None:
            atomic.remove_unfinished()
    os._exit(128 + number)
