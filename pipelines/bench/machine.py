"""Describes the machine of a benchmark, and the bound that its memory bandwidth sets to plain decoding."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import statistics
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dspark_jax.pipelines.bench.probes import seconds_of
from dspark_jax.pipelines.checkpoint_data import Checkpoint
from dspark_jax.speculators_common.version import version


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine and the versions of a benchmark."""

    platform: str
    device: str
    processor: str
    cores: int  # that this process may use
    python: str
    jax: str
    dspark_jax: str


def this_machine() -> Machine:
    """The machine and the versions of this process."""
    device = jax.devices()[0]
    return Machine(
        platform=device.platform,
        device=device.device_kind,
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        python=platform.python_version(),
        jax=jax.__version__,
        dspark_jax=version(),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """The lower bound of a plain step at batch 1: the time of reading all weights once. K/V reads are not counted."""

    weight_bytes: int
    bytes_per_second: float  # median over the run
    best_bytes_per_second: float  # of the fastest read
    seconds: float  # the bound, at the median bandwidth
    reached: float  # seconds / seconds of the measured step


def roofline(weight_bytes: int, bytes_per_second: float, best_bytes_per_second: float, step_seconds: float) -> Roofline:
    """The bound, and the share of it that a step of `step_seconds` reaches."""
    seconds = weight_bytes / bytes_per_second
    return Roofline(
        weight_bytes=weight_bytes,
        bytes_per_second=bytes_per_second,
        best_bytes_per_second=best_bytes_per_second,
        seconds=seconds,
        reached=seconds / step_seconds,
    )


def streamed_weight_bytes(checkpoint: Checkpoint, dtype: DTypeLike) -> int:
    """Bytes of weights that one decode step reads: all tensors, without an embedding that has a head beside it."""
    has_head = any(name.endswith("lm_head.weight") for name in checkpoint.tensors)
    read_whole = (
        source for name, source in checkpoint.tensors.items() if not (has_head and name.endswith("embed_tokens.weight"))
    )
    return sum(int(np.prod(source.shape)) for source in read_whole) * jnp.dtype(dtype).itemsize


class ReadProbe:
    """Measures the read bandwidth: reduces one float32 array, in several ways, between other measurements.

    The median over a run is used, because that of a step is, too. The array has 256 rows, which keeps every core busy
    and leaves long rows for vector registers. Which reduction is fastest depends on the platform.
    """

    def __init__(self, num_bytes: int) -> None:
        array = jnp.ones((256, num_bytes // 4 // 256), jnp.float32)
        reductions = [
            jax.jit(lambda x: jnp.sum(x, axis=1)),
            jax.jit(lambda x: jnp.max(x, axis=1)),
            jax.jit(lambda x: x @ jnp.ones((x.shape[1],), x.dtype)),
        ]
        self._num_bytes = array.nbytes
        self._calls = [functools.partial(reduction, array) for reduction in reductions]
        self._seconds: list[list[float]] = [[] for _ in reductions]
        jax.block_until_ready([call() for call in self._calls])

    def measure(self) -> None:
        """Time every reduction once more."""
        for call, seconds in zip(self._calls, self._seconds, strict=True):
            seconds.append(seconds_of(call))

    def bytes_per_second(self) -> float:
        """Median bandwidth of the fastest reduction."""
        return self._num_bytes / min(statistics.median(seconds) for seconds in self._seconds)

    def best_bytes_per_second(self) -> float:
        """Bandwidth of the fastest single read."""
        return self._num_bytes / min(min(seconds) for seconds in self._seconds)


def _processor() -> str:
    """The processor's name from /proc/cpuinfo; on other systems from Python's `platform`."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.processor() or platform.machine(),
    )
