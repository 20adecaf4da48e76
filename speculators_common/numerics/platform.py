"""All differences between platforms, as one value. A program is built for a `Platform`, not for this machine.

A module gets its platform from its constructor and passes it to its parts. A cache gets it from its module. Nothing
else asks for the current platform. So a program for a TPU or a GPU can be traced, lowered and compiled, with the
layouts of that platform, on a machine that has only a CPU. `docs/performance.md` has the measurements.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dspark_jax.speculators_common.errors import RequestError

PlatformName = Literal["cpu", "tpu", "gpu"]
ArgmaxForm = Literal["blockwise", "plain"]
SoftmaxForm = Literal["row_independent", "ordinary"]

_BITS = np.dtype(np.uint16)
_BFLOAT16 = np.dtype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Platform:
    """How programs for one platform store arrays and compute."""

    name: PlatformName
    bfloat16_rows_as_bits: bool
    """Whether bfloat16 arrays that are gathered or scattered by rows are stored as uint16 bit patterns.

    XLA:CPU computes bfloat16 gathers, scatters and chained updates in float32: it converts the whole array (a KV pool,
    an embedding) in every step. Bit patterns are moved without a conversion, and a free bitcast makes them bfloat16.
    """
    kernels_by_size: bool
    """Whether the size and dtype of a kernel decide its storage order. If false, the order is always `[in, out]`."""
    argmax: ArgmaxForm
    """`blockwise` halves the cost of a Markov chain on a CPU and doubles the memory traffic of one on a TPU."""
    softmax: SoftmaxForm
    """`row_independent`: the attention output of a row does not depend on the number of rows, bit for bit."""
    tied_head_shares_table: bool
    """Whether a tied head multiplies by the array of the embedding itself. If false, it has its own copy.

    A CPU needs the copy: lookups read bit patterns, and a one-row float32 product with a `[V, H]` array reaches only
    half the memory bandwidth.
    """
    pads_lone_bfloat16_row: bool
    """Whether a bfloat16 product of one row is computed as one of two rows.

    XLA:CPU has a fast bfloat16 product for two rows or more. It computes a single row in a scalar loop over a converted
    copy of the kernel, which is eight times slower.
    """
    attention: str
    """Name of the attention backend (`architectures/nn/attention/backends/registry.py`)."""

    @classmethod
    def of(cls, name: str) -> Platform:
        """The platform called `name`: `cpu`, `tpu` or `gpu`. Raises `RequestError` for another name."""
        platform = _PLATFORMS.get(name)
        if platform is None:
            raise RequestError(field="platform", found=name, allowed=", ".join(_PLATFORMS))
        return platform

    def row_dtype(self, dtype: DTypeLike) -> np.dtype:
        """The dtype in which an array of `dtype` is stored, if it is gathered or scattered by rows."""
        return _BITS if self.bfloat16_rows_as_bits and np.dtype(dtype) == _BFLOAT16 else np.dtype(dtype)


def default_platform() -> Platform:
    """The platform that jax compiles for in this process.

    Called only at the outermost level: by a command, by a function that a user calls, and by the constructor of a model
    that got no platform.
    """
    backend = jax.default_backend()
    return Platform.of("gpu" if backend in ("cuda", "rocm") else backend)


_CPU = Platform(
    name="cpu",
    bfloat16_rows_as_bits=True,
    kernels_by_size=True,
    argmax="blockwise",
    softmax="row_independent",
    tied_head_shares_table=False,
    pads_lone_bfloat16_row=True,
    attention="xla-head-major",
)
_TPU = Platform(
    name="tpu",
    bfloat16_rows_as_bits=False,
    kernels_by_size=False,
    argmax="plain",
    softmax="ordinary",
    tied_head_shares_table=True,
    pads_lone_bfloat16_row=False,
    attention="tpu-paged",
)
_GPU = dataclasses.replace(_TPU, name="gpu", attention="xla-slot-major")
_PLATFORMS: dict[str, Platform] = {platform.name: platform for platform in (_CPU, _TPU, _GPU)}
