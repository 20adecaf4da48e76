"""Markov heads: a low-rank bias that makes a draft token depend on the token before it (arXiv 2607.05147).

A head adds `bias(prev)` to the base logits of a slot. `prev` is a **target** id, so W1 has V rows. The bias is over
**draft** ids, so W2 has Vd columns. The bias is added after the soft-cap and is not capped. Products multiply in the
dtype of the kernel and accumulate in float32; all other arithmetic is float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from dspark_jax.speculators_common.formats.draft_config import DraftConfig
from dspark_jax.speculators_common.numerics.initial_values import initial_values
from dspark_jax.speculators_common.numerics.linear import Linear
from dspark_jax.speculators_common.numerics.platform import Platform
from dspark_jax.speculators_common.numerics.rows import decode_rows, encode_rows

State = Float[Array, "B r"]


class MarkovHead(nnx.Module):
    """The vanilla head, `bias = W2 W1[prev]`, and the base class of the others."""

    needs_hidden = False

    def __init__(self, config: DraftConfig, *, dtype: DTypeLike, platform: Platform, rngs: nnx.Rngs) -> None:
        rank = config.markov_rank
        w1 = initial_values((config.vocab_size, rank), dtype, rngs)
        self.w1 = nnx.Param(encode_rows(w1, platform.row_dtype(dtype)))
        self.w2 = Linear(rank, config.num_draft_ids, dtype=dtype, platform=platform, rngs=rngs)

    def embed(self, prev: Int32[Array, "*axes"]) -> Float[Array, "*axes r"]:
        """`W1[prev]`; `prev` are target ids."""
        return decode_rows(jnp.take(self.w1[...], prev, axis=0, mode="clip"))

    def initial_state(self, rows: int) -> State | None:
        """The state before the first slot of a block; `None` for heads without a state."""
        return None

    def bias(
        self, embedded: Float[Array, "B r"], hidden: Float[Array, "B d"] | None, state: State | None
    ) -> tuple[Float[Array, "B Vd"], State | None]:
        """The float32 bias of one slot, and the next state.

        `embedded` is `W1[prev]`, `hidden` the final-normed hidden state of the slot, `state` the state before the slot.
        """
        return self.w2.float32(embedded), state


class GatedMarkovHead(MarkovHead):
    """The gated head: `bias = W2 (sigmoid(gate([h; e])) * e)` with `e = W1[prev]`."""

    needs_hidden = True

    def __init__(self, config: DraftConfig, *, dtype: DTypeLike, platform: Platform, rngs: nnx.Rngs) -> None:
        super().__init__(config, dtype=dtype, platform=platform, rngs=rngs)
        self.gate = Linear(
            config.hidden_size + config.markov_rank,
            config.markov_rank,
            bias=True,
            dtype=dtype,
            platform=platform,
            rngs=rngs,
        )

    def bias(
        self, embedded: Float[Array, "B r"], hidden: Float[Array, "B d"] | None, state: State | None
    ) -> tuple[Float[Array, "B Vd"], State | None]:
        assert hidden is not None
        gate = jax.nn.sigmoid(self.gate.float32(jnp.concatenate([hidden, embedded.astype(hidden.dtype)], axis=-1)))
        return self.w2.float32(gate * embedded.astype(jnp.float32)), state


class RNNMarkovHead(MarkovHead):
    """A gated recurrent cell over the slots of a block, with `e = W1[prev]` and the state `s`, zero before every block.

    `(g, c, o) = split(joint([s; e; h]))`, `bias = W2 tanh(o)`, then `s <- sigmoid(g) s + (1 - sigmoid(g)) tanh(c)`.
    So the bias is made from the state **before** the update.
    """

    needs_hidden = True

    def __init__(self, config: DraftConfig, *, dtype: DTypeLike, platform: Platform, rngs: nnx.Rngs) -> None:
        super().__init__(config, dtype=dtype, platform=platform, rngs=rngs)
        rank = config.markov_rank
        self.rank = rank
        self.joint = Linear(
            config.hidden_size + 2 * rank, 3 * rank, bias=True, dtype=dtype, platform=platform, rngs=rngs
        )

    def initial_state(self, rows: int) -> State:
        return jnp.zeros((rows, self.rank), jnp.float32)

    def bias(
        self, embedded: Float[Array, "B r"], hidden: Float[Array, "B d"] | None, state: State | None
    ) -> tuple[Float[Array, "B Vd"], State | None]:
        assert hidden is not None
        assert state is not None
        joint = self.joint.float32(
            jnp.concatenate([state.astype(hidden.dtype), embedded.astype(hidden.dtype), hidden], axis=-1)
        )
        gate, candidate, output = jnp.split(joint, 3, axis=-1)
        gate = jax.nn.sigmoid(gate)
        return self.w2.float32(jnp.tanh(output)), gate * state + (1 - gate) * jnp.tanh(candidate)


class TanhMarkovHead(MarkovHead):
    """A plain recurrent cell over the slots of a block, with `e = W1[prev]` and the state `s`, zero before every block.

    `s <- tanh(s wH + e + bH)`, `bias = s wO`: the bias is made from the state **after** the update. The hidden state of
    the slot is not used. `w2` is loaded and saved with the draft, but not used.
    """

    def __init__(self, config: DraftConfig, *, dtype: DTypeLike, platform: Platform, rngs: nnx.Rngs) -> None:
        super().__init__(config, dtype=dtype, platform=platform, rngs=rngs)
        rank = config.markov_rank
        self.rank = rank
        self.transition = Linear(rank, rank, bias=True, dtype=dtype, platform=platform, rngs=rngs)
        self.output = Linear(rank, config.num_draft_ids, dtype=dtype, platform=platform, rngs=rngs)

    def initial_state(self, rows: int) -> State:
        return jnp.zeros((rows, self.rank), jnp.float32)

    def bias(
        self, embedded: Float[Array, "B r"], hidden: Float[Array, "B d"] | None, state: State | None
    ) -> tuple[Float[Array, "B Vd"], State | None]:
        assert state is not None
        state = jnp.tanh(self.transition.float32(state) + embedded.astype(jnp.float32))
        return self.output.float32(state), state


_HEADS: dict[str, type[MarkovHead]] = {
    "vanilla": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RNNMarkovHead,
    "tanh_rnn": TanhMarkovHead,
}


def make_markov_head(config: DraftConfig, *, dtype: DTypeLike, platform: Platform, rngs: nnx.Rngs) -> MarkovHead | None:
    """The head that `config.markov_head_type` names; `None` for `none` (rank 0)."""
    if config.markov_head_type == "none":
        return None
    return _HEADS[config.markov_head_type](config, dtype=dtype, platform=platform, rngs=rngs)
