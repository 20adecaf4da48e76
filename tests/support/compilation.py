"""How tests compile: quickly where only the values count, and without keeping what no later test needs.

A test that asks for `ordinary_compilation` gets the program that a user runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax._src import compiler

# What makes faster code and takes most of the time that a small program needs to compile: XLA's newer emitters, its
# library of fused products, and handing the code to many threads. Names and values of a jaxlib are kept by no promise.
_QUICK_OPTIONS: dict[str, Any] = {
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_experimental_ynn_fusion_type": "",
    "xla_cpu_use_xnnpack": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
_MEBIBYTE = 2**20
_GATHER: Any = compiler.get_compile_options


@contextlib.contextmanager
def quick_compilation() -> Iterator[None]:
    """XLA without its slow passes and emitters. Results agree to rounding."""
    # jax reads this switch when it compiles, whatever it was when the function was traced.
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        with _added_options(quick_options()):
            yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


@contextlib.contextmanager
def ordinary_compilation() -> Iterator[None]:
    """XLA as a user has it, also inside `quick_compilation`. What was compiled before is used again, so the function in
    question is jitted in here, or `jax.clear_caches` is called.
    """
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        with _added_options({}):
            yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@functools.cache
def quick_options() -> dict[str, Any]:
    """The options that this XLA knows: without the others tests are slower, and no less right."""
    return {name: value for name, value in _QUICK_OPTIONS.items() if _is_known(name, value)}


def _is_known(name: str, value: Any) -> bool:
    try:
        jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError:
        return False
    return True


@contextlib.contextmanager
def _added_options(options: Mapping[str, Any]) -> Iterator[None]:
    """Compile with these XLA options and with no others, also inside another call of this function. No public setting
    of jax reaches them for every function of a process, so its function that gathers them is wrapped; what a call to
    `jax.jit` states itself goes first.
    """
    outer = compiler.get_compile_options

    def with_options(*args: Any, env_options_overrides: dict[str, Any] | None = None, **named: Any) -> Any:
        return _GATHER(*args, env_options_overrides={**options, **(env_options_overrides or {})}, **named)

    compiler.get_compile_options = with_options
    try:
        yield
    finally:
        compiler.get_compile_options = outer


def resident_mebibytes() -> int:
    """The memory that this process holds now; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * 4096 // _MEBIBYTE


def peak_mebibytes() -> int:
    """The most memory that this process has held; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // (_MEBIBYTE if sys.platform == "darwin" else 1024)


def forget_compiled_programs() -> None:
    """Drop every compiled program, and hand the memory back to the system where the C library can."""
    jax.clear_caches()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library: memory is used again, if not handed back
        ctypes.CDLL("libc.so.6").malloc_trim(0)
