"""Atomic writing of a directory: the files go to a temporary directory beside it, which is then renamed."""

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

_unfinished: set[Path] = set()  # temporary directories that are written now
_CURRENT_DIRECTORY, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


@contextmanager
def replaced_directory(directory: Path | str, *, replaceable: Collection[str]) -> Iterator[Path]:
    """An empty directory to write into. It replaces `directory` in one step when the `with` body ends.

    If the body or the process fails, `directory` keeps its old content. An existing directory is replaced only if all
    its files are named in `replaceable`; otherwise a `DSparkError` names the others.
    """
    final = Path(directory).resolve()
    _check_replaceable(final, replaceable)
    with _written(final, _put_in_place) as fresh:
        yield fresh


@contextmanager
def new_directory(directory: Path | str) -> Iterator[Path]:
    """An empty directory to write into. It becomes `directory`, which must not exist, when the `with` body ends.

    If the body or the process fails, `directory` is not created. Raises `DSparkError` if `directory` exists before the
    body or after it.
    """
    check_absent(directory)
    final = Path(directory).resolve()
    with _written(final, _put_where_nothing_is) as fresh:
        yield fresh


def check_absent(directory: Path | str) -> None:
    """Raise a `DSparkError` if this path exists. A broken link counts as existing."""
    if os.path.lexists(Path(directory)):
        raise DSparkError(f"{directory}: exists already, allowed a path where nothing is")


@contextmanager
def _written(final: Path, put: Callable[[Path, Path], None]) -> Iterator[Path]:
    """A temporary directory beside `final`. After the body it is flushed to the disk, and `put` moves it to `final`.

    If the body or `put` fails, the temporary directory is removed. Raises `DSparkError` where the system cannot write.
    """
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".saving", dir=final.parent))
    except OSError as error:
        raise DSparkError(f"cannot be written: {error.strerror or error}", file=final) from error
    _unfinished.add(fresh)
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
    except OSError as error:
        where = f" ({Path(error.filename).name})" if isinstance(error.filename, str) else ""
        raise DSparkError(f"cannot be written: {error.strerror or error}{where}", file=final) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        _unfinished.discard(fresh)


def remove_unfinished() -> None:
    """Remove the temporary directories of all writes in progress, for a process that ends at once."""
    for fresh in tuple(_unfinished):
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
    """Move `fresh` to `final`. An old directory at `final` is moved to `fresh`, or removed."""
    if not final.exists():
        fresh.rename(final)
    elif not _exchanged(fresh, final):
        # The system cannot swap the two in one step. The old directory is renamed first, and renamed back if the
        # second rename fails.
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
    """Swap two directories in one step; returns false if the system cannot do that."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return bool(rename(_CURRENT_DIRECTORY, os.fsencode(fresh), _CURRENT_DIRECTORY, os.fsencode(final), _EXCHANGE) == 0)


def _flush(path: Path) -> None:
    """Flush a file, or a directory where the system can open one, to the disk."""
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
