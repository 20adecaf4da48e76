"""Gated feed-forward layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dspark_jax.architectures.nn.linear import Linear


class GatedMLP(nnx.Module):
    """`down(silu(gate(x)) * up(x))`; gate and up are one kernel, gate first."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, bias=bias, dtype=dtype, rngs=rngs)
        self.down = Linear(intermediate_size, hidden_size, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "*axes H"]) -> Float[Array, "*axes H"]:
        gate, up = jnp.split(self.gate_up.wide(x), 2, axis=-1)
        return self.down((jax.nn.silu(gate) * up).astype(x.dtype))
