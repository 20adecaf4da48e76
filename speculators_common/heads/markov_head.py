"""Markov heads: the low-rank bias that makes a draft token depend on the one before it (arXiv 2607.05147, section on
the Markov head).

A head adds `bias(prev)` to the base logits of a slot. `prev` is a **target** id, so W1 has V rows; the bias is over
**draft** ids, so W2 has Vd columns. The bias comes after the soft-cap and is not capped itself. All arithmetic is
float32 except the products, which accumulate in float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from dspark_jax.speculators_common.formats.draft_config import DraftConfig
from dspark_jax.speculators_common.numerics.matmul import kernel_parameter, linear, matmul
from dspark_jax.speculators_common.numerics.storage import decode_rows, encode_rows, row_storage_dtype

State = Float[Array, "B r"]


class MarkovHead(nnx.Module):
    """`bias = W2 W1[prev]`, the vanilla head; the base of the others."""

    needs_hidden = False

    def __init__(self, config: DraftConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        rank = config.markov_rank
        w1 = 0.02 * jax.random.normal(rngs.params(), (config.vocab_size, rank), dtype)
        self.w1 = nnx.Param(encode_rows(w1, row_storage_dtype(dtype)))
        self.w2 = nnx.Param(0.02 * jax.random.normal(rngs.params(), (rank, config.num_draft_ids), dtype))

    def embed(self, prev: Int32[Array, "*axes"]) -> Float[Array, "*axes r"]:
        """`W1[prev]`; `prev` are target ids."""
        return decode_rows(jnp.take(self.w1[...], prev, axis=0, mode="clip"))

    def initial_state(self, rows: int) -> State | None:
        """The state before the first slot of a block; `None` for heads without one."""
        return None

    def bias(
        self, embedded: Float[Array, "B r"], hidden: Float[Array, "B d"] | None, state: State | None
    ) -> tuple[Float[Array, "B Vd"], State | None]:
        """Bias of one slot from `W1[prev]`, the slot's final-normed hidden state and the running state; and the next
        state.
        """
        return self._project(embedded), state

    def _project(self, x: Float[Array, "B r"]) -> Float[Array, "B Vd"]:
        w2 = self.w2[...]
        return matmul(x.astype(w2.dtype), w2)


class GatedMarkovHead(MarkovHead):
    """`bias = W2 (sigmoid(gate([h; e])) * e)`, hidden state first."""

    needs_hidden = True

    def __init__(self, config: DraftConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        super().__init__(config, dtype=dtype, rngs=rngs)
        self.gate = _Joint(config.hidden_size + config.markov_rank, config.markov_rank, dtype=dtype, rngs=rngs)

    def bias(
        self, embedded: Float[Array, "B r"], hidden: Float[Array, "B d"] | None, state: State | None
    ) -> tuple[Float[Array, "B Vd"], State | None]:
        assert hidden is not None
        gate = jax.nn.sigmoid(self.gate(jnp.concatenate([hidden, embedded.astype(hidden.dtype)], axis=-1)))
        return self._project(gate * embedded.astype(jnp.float32)), state


class RNNMarkovHead(MarkovHead):
    """A gated recurrent cell over the block: `(g, c, o) = split(joint([s; e; h]))`, `bias = W2 tanh(o)`, then `s <-
    sigmoid(g) s + (1 - sigmoid(g)) tanh(c)`.

    The bias comes from the projection of the **old** state; the state is zero before every block.
    """

    needs_hidden = True

    def __init__(self, config: DraftConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        super().__init__(config, dtype=dtype, rngs=rngs)
        rank = config.markov_rank
        self.rank = rank
        self.joint = _Joint(config.hidden_size + 2 * rank, 3 * rank, dtype=dtype, rngs=rngs)

    def initial_state(self, rows: int) -> State:
        return jnp.zeros((rows, self.rank), jnp.float32)

    def bias(
        self, embedded: Float[Array, "B r"], hidden: Float[Array, "B d"] | None, state: State | None
    ) -> tuple[Float[Array, "B Vd"], State | None]:
        assert hidden is not None
        assert state is not None
        joint = self.joint(
            jnp.concatenate([state.astype(hidden.dtype), embedded.astype(hidden.dtype), hidden], axis=-1)
        )
        gate, candidate, output = jnp.split(joint, 3, axis=-1)
        gate = jax.nn.sigmoid(gate)
        return self._project(jnp.tanh(output)), gate * state + (1 - gate) * jnp.tanh(candidate)


class TanhMarkovHead(MarkovHead):
    """A plain recurrent cell over the block: `s <- tanh(s wH + e + bH)`, `bias = s wO`, the state zero before every
    block.

    The bias comes from the **new** state, and the slot's hidden state is no input. `w2` is stored with the draft and
    takes no part.
    """

    def __init__(self, config: DraftConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        super().__init__(config, dtype=dtype, rngs=rngs)
        rank = config.markov_rank
        self.rank = rank
        self.transition = nnx.Param(0.02 * jax.random.normal(rngs.params(), (rank, rank), dtype))
        self.transition_bias = nnx.Param(jnp.zeros((rank,), jnp.float32))
        self.output = nnx.Param(0.02 * jax.random.normal(rngs.params(), (rank, config.num_draft_ids), dtype))

    def initial_state(self, rows: int) -> State:
        return jnp.zeros((rows, self.rank), jnp.float32)

    def bias(
        self, embedded: Float[Array, "B r"], hidden: Float[Array, "B d"] | None, state: State | None
    ) -> tuple[Float[Array, "B Vd"], State | None]:
        assert state is not None
        transition, output = self.transition[...], self.output[...]
        carried = matmul(state.astype(transition.dtype), transition)
        state = jnp.tanh(carried + embedded.astype(jnp.float32) + self.transition_bias[...][None, :])
        return matmul(state.astype(output.dtype), output), state


class _Joint(nnx.Module):
    """Linear with bias, float32 result."""

    def __init__(self, in_features: int, out_features: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.kernel = kernel_parameter(0.02 * jax.random.normal(rngs.params(), (in_features, out_features), dtype))
        self.bias = nnx.Param(jnp.zeros((out_features,), jnp.float32))

    def __call__(self, x: Float[Array, "B in"]) -> Float[Array, "B out"]:
        return linear(x, self.kernel) + self.bias[...][None, :]


_HEADS: dict[str, type[MarkovHead]] = {
    "vanilla": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RNNMarkovHead,
    "tanh_rnn": TanhMarkovHead,
}


def make_markov_head(config: DraftConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> MarkovHead | None:
    """The head that `config` names; `None` at rank 0."""
    if config.markov_head_type == "none":
        return None
    return _HEADS[config.markov_head_type](config, dtype=dtype, rngs=rngs)
