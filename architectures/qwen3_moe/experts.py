"""A feed-forward layer of experts, of which a router picks some for every token.

No token is ever dropped and no expert has a capacity: every token gets exactly its experts, whatever the others of the
batch get. Shapes are static, so there are two exact ways to compute it, chosen by the number of tokens when the program
is traced:

* few tokens: the kernels of the picked experts are gathered, one copy for each (token, expert) pair, and only they are
  read;
* from as many pairs as there are experts on: every expert sees every token, as matrix products over the stored kernels,
  and the picks of the router are weights on the result, 0 for the experts that were not picked. This reads each kernel
  once.

Results of the two agree to rounding.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from dspark_jax.speculators_common.numerics.linear import Linear, LinearStack
from dspark_jax.speculators_common.numerics.platform import Platform


class ExpertsMLP(nnx.Module):
    """`sum over the k picked experts e of weight_e * down_e(silu(gate_e(x)) * up_e(x))`; gate and up
    are one stack, gate first.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        num_picked: int,
        normalised: bool,
        dtype: DTypeLike,
        platform: Platform,
        rngs: nnx.Rngs,
    ) -> None:
        self.num_experts, self.num_picked, self.normalised = num_experts, num_picked, normalised
        self.router = Linear(hidden_size, num_experts, dtype=dtype, platform=platform, rngs=rngs)
        self.gate_up = LinearStack(
            num_experts, hidden_size, 2 * intermediate_size, dtype=dtype, platform=platform, rngs=rngs
        )
        self.down = LinearStack(num_experts, intermediate_size, hidden_size, dtype=dtype, platform=platform, rngs=rngs)

    def __call__(self, x: Float[Array, "T H"]) -> Float[Array, "T H"]:
        weights, picked = self.route(x)
        few = x.shape[0] * self.num_picked < self.num_experts
        return (self.by_gathering if few else self.over_all)(x, weights, picked).astype(x.dtype)

    def route(self, x: Float[Array, "T H"]) -> tuple[Float[Array, "T k"], Int32[Array, "T k"]]:
        """Float32 weights and numbers of the picked experts: the largest probabilities of a softmax over all
        experts.
        """
        weights, picked = jax.lax.top_k(jax.nn.softmax(self.router.float32(x), axis=-1), self.num_picked)
        if self.normalised:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return weights, picked.astype(jnp.int32)

    def by_gathering(
        self, x: Float[Array, "T H"], weights: Float[Array, "T k"], picked: Int32[Array, "T k"]
    ) -> Float[Array, "T H"]:
        """The picked experts of each token, float32."""
        tokens, hidden = x.shape
        numbers = picked.reshape(-1)
        out = self.down.picked(
            _activated(self.gate_up.picked(jnp.repeat(x, self.num_picked, axis=0), numbers)), numbers
        )
        return jnp.sum(out.reshape(tokens, self.num_picked, hidden) * weights[..., None], axis=1)

    def over_all(
        self, x: Float[Array, "T H"], weights: Float[Array, "T k"], picked: Int32[Array, "T k"]
    ) -> Float[Array, "T H"]:
        """All experts on all tokens, float32."""
        tokens, hidden = x.shape
        is_picked = picked[..., None] == jnp.arange(self.num_experts, dtype=jnp.int32)[None, None]
        share = jnp.sum(jnp.where(is_picked, weights[..., None], 0.0), axis=1)
        # A batch axis on both sides keeps the kernels as they are stored; without one XLA transposes them first.
        inner = _activated(self.gate_up.each(jnp.broadcast_to(x[None], (self.num_experts, tokens, hidden))))
        # An expert that was not picked counts nothing, even where it overflows.
        weighted = jnp.where(jnp.any(is_picked, axis=1)[..., None], inner.swapaxes(0, 1) * share[..., None], 0.0)
        return self.down.summed(weighted)


def _activated(gate_up: Float[Array, "*axes F2"]) -> Float[Array, "*axes F"]:
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up
