"""The gated feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dspark_jax.speculators_common.numerics.linear import Linear
from dspark_jax.speculators_common.numerics.platform import Platform

Activation = Literal["silu", "gelu_pytorch_tanh"]


def gelu_tanh(x: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
    """GELU by the tanh approximation."""
    return jax.nn.gelu(x, approximate=True)


ACTIVATIONS: Mapping[Activation, Callable[[Array], Array]] = {"silu": jax.nn.silu, "gelu_pytorch_tanh": gelu_tanh}


class GatedMLP(nnx.Module):
    """`down(activation(gate(x)) * up(x))`. Gate and up are one kernel with the gate's columns first."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation = "silu",
        bias: bool = False,
        dtype: DTypeLike,
        platform: Platform,
        rngs: nnx.Rngs,
    ) -> None:
        self.activation = activation
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, bias=bias, dtype=dtype, platform=platform, rngs=rngs)
        self.down = Linear(intermediate_size, hidden_size, bias=bias, dtype=dtype, platform=platform, rngs=rngs)

    def __call__(self, x: Float[Array, "*axes H"]) -> Float[Array, "*axes H"]:
        gate, up = jnp.split(self.gate_up.float32(x), 2, axis=-1)
        return self.down((ACTIVATIONS[self.activation](gate) * up).astype(x.dtype))
