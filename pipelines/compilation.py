"""Measures compilation time, and sets JAX's persistent compilation cache."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from dspark_jax.speculators_common.errors import RequestError

_COMPILE_EVENTS = "/jax/core/compile/"  # tracing, lowering, and compiling or reading from the persistent cache
_DIRECTORY = "jax_compilation_cache_dir"
_HITS, _MISSES = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"


class CompileClock:
    """Records when JAX compiles in this process, in seconds of `time.perf_counter()`.

    JAX compiles a program inside the first call of it, so compilation has to be subtracted from measured times.
    `from_cache` and `compiled` count the executables that the persistent cache held and did not hold.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []
        self.from_cache = 0
        self.compiled = 0

    def seconds(self, start: float = 0.0, end: float = float("inf")) -> float:
        """Seconds of compilation between `start` and `end`. Overlapping spans, from nested traces, count once."""
        total, covered = 0.0, start
        for first, last in sorted(self._spans):
            first, last = max(first, covered), min(last, end)
            if last > first:
                total, covered = total + last - first, last
        return total

    @contextmanager
    def watching(self) -> Iterator[CompileClock]:
        """Record JAX's compilations while the context is open."""
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)
        try:
            yield self
        finally:
            jax.monitoring.unregister_event_duration_listener(self._on_duration)
            jax.monitoring.unregister_event_listener(self._on_event)

    def _on_duration(self, event: str, duration_secs: float, **_: Any) -> None:
        if event.startswith(_COMPILE_EVENTS):
            now = time.perf_counter()
            self._spans.append((now - duration_secs, now))

    def _on_event(self, event: str, **_: Any) -> None:
        self.from_cache += event == _HITS
        self.compiled += event == _MISSES


def default_cache_directory() -> Path:
    """The default directory of compiled programs: `$XDG_CACHE_HOME/dspark-jax`, else `~/.cache/dspark-jax`."""
    stated = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(stated) if Path(stated).is_absolute() else Path.home() / ".cache") / "dspark-jax"


def use_compilation_cache(stated: str | None) -> str:
    """Set JAX's persistent compilation cache for this process; returns its directory, or `off` and the reason.

    `stated` is a directory or `off`. `None` means the directory that JAX is already set to
    (`JAX_COMPILATION_CACHE_DIR`), else the default directory. Raises `RequestError` if a stated directory cannot be
    written. If the default directory cannot be written, the cache is off.
    """
    if stated == "off":
        jax.config.update("jax_enable_compilation_cache", False)
        return "off"
    if stated is None and (known := getattr(jax.config, _DIRECTORY)):
        return str(known)
    try:
        directory = _writable(Path(stated) if stated else default_cache_directory())
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        reason = error.strerror if isinstance(error, OSError) else error
        if stated:
            raise RequestError(
                f"found {stated} ({reason}), allowed a directory that can be written, or off",
                field="--compilation-cache",
                found=stated,
                allowed="a directory that can be written, or off",
            ) from error
        return f"off ({reason})"
    settings = {
        "jax_enable_compilation_cache": True,
        _DIRECTORY: str(directory),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
    return str(directory)


def _writable(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    if not os.access(directory, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))
    return directory
