"""The machine under a benchmark, and the bound that its memory sets to plain decoding."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dspark_jax import __version__
from dspark_jax.pipelines.benchmark_probes import seconds_of
from dspark_jax.pipelines.checkpoint_data import Checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Where it ran."""

    platform: str
    device: str
    processor: str
    cores: int  # that this process may use
    python: str
    jax: str
    dspark_jax: str


def this_machine() -> Machine:
    """This process's machine and versions."""
    device = jax.devices()[0]
    return Machine(
        platform=device.platform,
        device=device.device_kind,
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        python=platform.python_version(),
        jax=jax.__version__,
        dspark_jax=__version__,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """Plain decoding of one request against the memory: no step is faster than one read of the weights. K/V reads are not counted."""

    weight_bytes: int
    bytes_per_second: float
    seconds: float  # of one step at that bandwidth
    reached: float  # that / the measured step


def roofline(weight_bytes: int, bytes_per_second: float, step_seconds: float) -> Roofline:
    """The bound, and how much of it a step of `step_seconds` reaches."""
    seconds = weight_bytes / bytes_per_second
    return Roofline(weight_bytes=weight_bytes, bytes_per_second=bytes_per_second, seconds=seconds, reached=seconds / step_seconds)


def streamed_weight_bytes(checkpoint: Checkpoint, dtype: DTypeLike) -> int:
    """Bytes of weights that one decode step has to read: every tensor once, but single rows only of an embedding beside a head of its own."""
    has_head = any(name.endswith("lm_head.weight") for name in checkpoint.tensors)
    read_whole = (source for name, source in checkpoint.tensors.items() if not (has_head and name.endswith("embed_tokens.weight")))
    return sum(int(np.prod(source.shape)) for source in read_whole) * jnp.dtype(dtype).itemsize


def read_bandwidth(num_bytes: int, repeats: int = 7) -> float:
    """Bytes per second of reading one float32 array of `num_bytes` once: the best of several reductions and repeats.

    256 rows keep every core busy and let each reduce long rows in vector registers; which reduction is fastest differs by platform.
    """
    array = jnp.ones((256, num_bytes // 4 // 256), jnp.float32)
    reductions = [
        jax.jit(lambda x: jnp.sum(x, axis=1)),
        jax.jit(lambda x: jnp.max(x, axis=1)),
        jax.jit(lambda x: x @ jnp.ones((x.shape[1],), x.dtype)),
    ]
    calls = [functools.partial(reduction, array) for reduction in reductions]
    jax.block_until_ready([call() for call in calls])
    best = min(seconds_of(call) for _ in range(repeats) for call in calls)
    return float(array.nbytes / best)


def _processor() -> str:
    """The processor's name as Linux spells it; elsewhere what Python knows."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor() or platform.machine())
