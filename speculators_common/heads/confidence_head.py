"""The confidence head: the probability that a slot is accepted if all earlier slots of its block are accepted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from dspark_jax.speculators_common.formats.draft_config import DraftConfig
from dspark_jax.speculators_common.numerics.linear import Linear
from dspark_jax.speculators_common.numerics.platform import Platform


class ConfidenceHead(nnx.Module):
    """`z = w [h; W1[prev]] + b`, or `z = w h + b` without the Markov input, in float32.

    `sigmoid(z)` is the confidence of the slot. `h` is the final-normed hidden state. The Markov input is the row of W1
    for every type of Markov head. A checkpoint without a bias loads with `b = 0`.
    """

    def __init__(self, config: DraftConfig, *, platform: Platform, rngs: nnx.Rngs) -> None:
        width = config.hidden_size + (config.markov_rank if config.confidence_head_with_markov else 0)
        self.projection = Linear(width, 1, bias=True, dtype=jnp.float32, platform=platform, rngs=rngs)

    def __call__(self, hidden: Float[Array, "B D d"], embedded: Float[Array, "B D r"] | None) -> Float[Array, "B D"]:
        features = hidden.astype(jnp.float32)
        if embedded is not None:
            features = jnp.concatenate([features, embedded.astype(jnp.float32)], axis=-1)
        return self.projection.float32(features)[..., 0]


def confident_length(logits: Float[Array, "B D"], threshold: Float[Array, "B"]) -> Int32[Array, "B"]:
    """Drafts to verify per row, 0..D: those before the first slot whose confidence is below the row's `threshold`.

    `logits` are the confidence logits. A threshold of 0 or less keeps all D drafts.
    """
    return _length(logits, jnp.broadcast_to(threshold[:, None], logits.shape))


def confident_length_after_first(logits: Float[Array, "B D"], thresholds: Float[Array, "B D"]) -> Int32[Array, "B"]:
    """Drafts to verify per row, 1..D, with one threshold per slot.

    The threshold of slot 0 is ignored, so that a proposal has at least one draft.
    """
    return _length(logits, thresholds.at[:, 0].set(0))


def _length(logits: Float[Array, "B D"], thresholds: Float[Array, "B D"]) -> Int32[Array, "B"]:
    unsure = (jax.nn.sigmoid(logits) < thresholds) & (thresholds > 0)
    sure = jnp.cumprod(jnp.where(unsure, 0, 1), axis=-1)
    return jnp.sum(sure, axis=-1, dtype=jnp.int32)
