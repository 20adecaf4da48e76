"""The clock of compilation time, and the directory of the compilation cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.pipelines.compilation import CompileClock, default_cache_directory, use_compilation_cache
from dspark_jax.speculators_common.errors import RequestError

_SETTINGS = (
    "jax_enable_compilation_cache",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture(autouse=True)
def settings_restored() -> Iterator[None]:
    before = {name: jax.config.values[name] for name in _SETTINGS}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_the_clock_sees_the_first_call_only() -> None:
    function = jax.jit(lambda x: jnp.sin(x) * 3)
    clock = CompileClock()
    x = jnp.ones(3)
    with clock.watching():
        start = time.perf_counter()
        function(x).block_until_ready()
        between = time.perf_counter()
        function(x).block_until_ready()
    end = time.perf_counter()
    assert 0 < clock.seconds() <= between - start
    assert clock.seconds(start, between) == clock.seconds()
    assert clock.seconds(between, end) == 0


def test_nested_compilation_counts_once() -> None:
    inner = jax.jit(lambda x: jnp.tan(x) + 1)
    outer = jax.jit(lambda x: inner(x) * 2 + inner(x + 1))
    x = jnp.ones(5)
    with CompileClock().watching() as clock:
        start = time.perf_counter()
        outer(x).block_until_ready()
        elapsed = time.perf_counter() - start
    assert 0 < clock.seconds() <= elapsed


def test_a_clock_that_no_longer_watches_stands_still() -> None:
    clock = CompileClock()
    with clock.watching():
        pass
    jax.jit(lambda x: jnp.cos(x) - 7)(jnp.ones(2)).block_until_ready()
    assert clock.seconds() == 0


def test_the_default_directory_follows_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_directory() == tmp_path / "dspark-jax"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_directory() == tmp_path / ".cache" / "dspark-jax"


def test_by_default_programs_are_kept_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert use_compilation_cache(None) == str(tmp_path / "dspark-jax")
    assert (tmp_path / "dspark-jax").is_dir()
    kept = [jax.config.values[name] for name in _SETTINGS]
    assert kept == [True, str(tmp_path / "dspark-jax"), 0.0, -1]


def test_what_jax_was_told_goes_before_the_default_and_a_flag_before_both(tmp_path: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "told"))
    assert use_compilation_cache(None) == str(tmp_path / "told")
    assert use_compilation_cache(str(tmp_path / "flag")) == str(tmp_path / "flag")
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "flag")


def test_off_is_off() -> None:
    assert use_compilation_cache("off") == "off"
    assert jax.config.values["jax_enable_compilation_cache"] is False


def test_a_directory_that_cannot_be_made_is_an_error_if_stated_and_else_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        RequestError, match=r"--compilation-cache: found .*file/below \(Not a directory\), allowed a directory"
    ):
        use_compilation_cache(str(tmp_path / "file" / "below"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert use_compilation_cache(None) == "off (Not a directory)"
