"""Pallas kernels for TPUs on a machine without one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu


@contextlib.contextmanager
def interpreted_kernels(*, simulated_memory: bool) -> Iterator[None]:
    """Kernels for TPUs that are traced here run on a CPU.

    With `simulated_memory` reads outside of an array and uninitialised memory show, and a call is some 10 times slower.
    """
    # Not documented for `True`, which `pallas_call` itself takes: the body of the kernel as ordinary operations.
    params: Any = pltpu.InterpretParams() if simulated_memory else True
    with pltpu.force_tpu_interpret_mode(params):
        yield


@contextlib.contextmanager
def lowering_for_tpu() -> Iterator[None]:
    """Kernels that are lowered here are for a TPU v5e, whatever devices this machine has."""
    device = jax.sharding.AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield
