"""The feed-forward layer of experts: a router picks `k` of `E` experts for every token.

It computes what the sparse block of `Qwen3MoeForCausalLM` of the transformers library computes. Experts have no
capacity limit: every token is computed by exactly its picked experts, independent of the other tokens. There are two
ways to compute it. The static number of (token, expert) pairs decides between them when the program is traced:

* Fewer pairs than experts: the kernels of the picked experts are gathered, one copy per pair. Other kernels are not
  read.
* Otherwise: every expert computes every token, by matrix products over the stored kernels. The router's weights then
  multiply the results, with weight 0 for experts that were not picked. Each kernel is read once.

The results of the two ways are equal up to rounding.
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
    """`sum over picked experts e of weight_e * down_e(silu(gate_e(x)) * up_e(x))`.

    Gate and up of an expert are one kernel with the gate's columns first. With `normalised` the weights of the picked
    experts of a token are divided by their sum.
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
        """Float32 weights and indices of the picked experts: the `k` largest of a softmax over all experts."""
        weights, picked = jax.lax.top_k(jax.nn.softmax(self.router.float32(x), axis=-1), self.num_picked)
        if self.normalised:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return weights, picked.astype(jnp.int32)

    def by_gathering(
        self, x: Float[Array, "T H"], weights: Float[Array, "T k"], picked: Int32[Array, "T k"]
    ) -> Float[Array, "T H"]:
        """The layer's output in float32, computed by gathering the kernels of the picked experts."""
        tokens, hidden = x.shape
        experts = picked.reshape(-1)
        out = self.down.picked(
            _activated(self.gate_up.picked(jnp.repeat(x, self.num_picked, axis=0), experts)), experts
        )
        return jnp.sum(out.reshape(tokens, self.num_picked, hidden) * weights[..., None], axis=1)

    def over_all(
        self, x: Float[Array, "T H"], weights: Float[Array, "T k"], picked: Int32[Array, "T k"]
    ) -> Float[Array, "T H"]:
        """The layer's output in float32, computed by running all experts on all tokens."""
        tokens, hidden = x.shape
        is_picked = picked[..., None] == jnp.arange(self.num_experts, dtype=jnp.int32)[None, None]
        share = jnp.sum(jnp.where(is_picked, weights[..., None], 0.0), axis=1)
        # With a batch axis on both operands XLA reads the kernels as they are stored. Otherwise it transposes them.
        inner = _activated(self.gate_up.each(jnp.broadcast_to(x[None], (self.num_experts, tokens, hidden))))
        # `where` and not the weight 0 alone: an expert that was not picked may overflow, and 0 times infinity is NaN.
        weighted = jnp.where(jnp.any(is_picked, axis=1)[..., None], inner.swapaxes(0, 1) * share[..., None], 0.0)
        return self.down.summed(weighted)


def _activated(gate_up: Float[Array, "*axes F2"]) -> Float[Array, "*axes F"]:
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up
