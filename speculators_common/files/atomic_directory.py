"""Writing a directory whole or not at all: a temporary one beside it, then a rename."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from dspark_jax.speculators_common.errors import DSparkError

_CURRENT_DIRECTORY, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


@contextmanager
def replaced_directory(directory: Path | str, *, replaceable: Collection[str]) -> Iterator[Path]:
    """An empty directory to write into; when the body ends it becomes `directory`, in one step.

    If the body or the process fails, `directory` keeps what it held. An existing directory is replaced only if it holds
    nothing but files named in `replaceable`; a `DSparkError` names what else is in it.
    """
    final = Path(directory).resolve()
    _check_replaceable(final, replaceable)
    with _written(final, _put_in_place) as fresh:
        yield fresh


@contextmanager
def new_directory(directory: Path | str) -> Iterator[Path]:
    """An empty directory to write into; when the body ends it becomes `directory`, which must not exist yet, in one
    step.

    If the body or the process fails, there is no `directory`. A `DSparkError` if something is there, before the body or
    after it.
    """
    check_absent(directory)
    final = Path(directory).resolve()
    with _written(final, _put_where_nothing_is) as fresh:
        yield fresh


def check_absent(directory: Path | str) -> None:
    """Raise a `DSparkError` if there is something at this path, a link that leads nowhere included."""
    if os.path.lexists(Path(directory)):
        raise DSparkError(f"{directory}: exists already, allowed a path where nothing is")


@contextmanager
def _written(final: Path, put: Callable[[Path, Path], None]) -> Iterator[Path]:
    """A directory beside `final`, which `put` moves there once all of it is on the disk; it is gone whatever
    happens.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".saving", dir=final.parent))
    try:
        yield fresh
        allowed = ~_umask()
        fresh.chmod(0o777 & allowed)
        for file in fresh.iterdir():
            file.chmod(0o666 & allowed)  # some libraries write files that their owner alone can read
            _flush(file)
        _flush(fresh)
        put(fresh, final)
        _flush(final.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _check_replaceable(final: Path, replaceable: Collection[str]) -> None:
    if not final.exists():
        return
    if not final.is_dir():
        raise DSparkError(f"{final}: is a file, allowed a directory")
    others = sorted(entry.name for entry in final.iterdir() if entry.name not in replaceable)
    if others:
        raise DSparkError(
            f"{final}: found {', '.join(others[:3])} in it, allowed a new directory or one with nothing but "
            f"{', '.join(replaceable)}"
        )


def _put_in_place(fresh: Path, final: Path) -> None:
    """After this `final` is the new directory, and `fresh` the old one if there was one."""
    if not final.exists():
        fresh.rename(final)
    elif not _exchanged(fresh, final):
        # No exchange in one step here: for a moment the old directory has another name, and comes back if the second
        # rename fails.
        old = fresh.with_suffix(".old")
        final.rename(old)
        try:
            fresh.rename(final)
        except OSError:
            old.rename(final)
            raise
        shutil.rmtree(old, ignore_errors=True)


def _put_where_nothing_is(fresh: Path, final: Path) -> None:
    check_absent(final)
    fresh.rename(final)


def _exchanged(fresh: Path, final: Path) -> bool:
    """Swap two directories in one step; false where the system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return bool(rename(_CURRENT_DIRECTORY, os.fsencode(fresh), _CURRENT_DIRECTORY, os.fsencode(final), _EXCHANGE) == 0)


def _flush(path: Path) -> None:
    """Ask the system to write `path` out; directories too, where they can be opened."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
