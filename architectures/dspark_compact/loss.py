"""The training loss of the compact draft (arXiv 2607.05147).

It is the weighted sum of the cross entropy, the L1 distance to the target's distribution and the confidence loss. Axis
letter `A`: the anchors of a training batch.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

_CROSS_ENTROPY, _DISTANCE, _CONFIDENCE = 0.1, 0.9, 1.0  # weights of the three terms
_CLIP = 1e-6  # the smallest confidence, and the smallest distance from 1, that the logarithms see


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class CompactLoss:
    """The total loss, its three terms, and the values of every slot.

    Each term is the mean over anchors of the weighted sum over slots. The weights are not normalised. All arrays are
    float32.
    """

    total: Float[Array, ""]
    cross_entropy: Float[Array, ""]
    distance: Float[Array, ""]
    confidence: Float[Array, ""]
    weights: Float[Array, "W"]  # of slot k: exp(-k / W)
    cross_entropy_per_slot: Float[Array, "A W"]
    l1_per_slot: Float[Array, "A W"]  # sum over ids of |p_draft - p_target|, twice the total variation distance
    # 1 - l1 / 2: the probability that the target accepts the slot. It is the label of the confidence, without gradient.
    acceptance: Float[Array, "A W"]
    confidence_per_slot: Float[Array, "A W"]  # binary cross entropy with the label `acceptance`

    @property
    def acceptance_per_slot(self) -> Float[Array, "W"]:
        """The mean acceptance of every slot over the anchors."""
        return jnp.mean(self.acceptance, axis=0)

    @property
    def tau_per_anchor(self) -> Float[Array, "A"]:
        """The expected number of committed tokens of a round, bonus included.

        It is 1 plus the sum over slots of the probability that this slot and all slots before it are accepted.
        """
        return 1 + jnp.sum(jnp.cumprod(self.acceptance, axis=-1), axis=-1)


def compact_loss(
    draft_logits: Float[Array, "A W V"],
    confidence: Float[Array, "A W"],
    target_logits: Float[Array, "A W V"],
    labels: Int32[Array, "A W"],
) -> CompactLoss:
    """The loss of `draft_logits` and `confidence`, the two results of `CompactDraft.forward_train`.

    `confidence` are probabilities. `target_logits` are the target's logits for the tokens `labels`, with the soft-cap.
    No gradient flows into `target_logits` or into the label of the confidence. The gradient of the confidence term
    does flow into the backbone and into W1 of the Markov head.
    """
    log_probabilities = jax.nn.log_softmax(draft_logits.astype(jnp.float32), axis=-1)
    wanted = jax.nn.softmax(jax.lax.stop_gradient(target_logits.astype(jnp.float32)), axis=-1)
    cross_entropy = -jnp.take_along_axis(log_probabilities, labels[..., None], axis=-1)[..., 0]
    l1 = jnp.sum(jnp.abs(jnp.exp(log_probabilities) - wanted), axis=-1)
    acceptance = jax.lax.stop_gradient(1 - 0.5 * l1)
    clipped = jnp.clip(confidence, _CLIP, 1 - _CLIP)
    binary = -(acceptance * jnp.log(clipped) + (1 - acceptance) * jnp.log(1 - clipped))
    width = draft_logits.shape[1]
    weights = jnp.exp(-jnp.arange(width, dtype=jnp.float32) / width)
    reduced = [jnp.mean(jnp.sum(weights[None, :] * term, axis=-1)) for term in (cross_entropy, l1, binary)]
    return CompactLoss(
        total=_CROSS_ENTROPY * reduced[0] + _DISTANCE * reduced[1] + _CONFIDENCE * reduced[2],
        cross_entropy=reduced[0],
        distance=reduced[1],
        confidence=reduced[2],
        weights=weights,
        cross_entropy_per_slot=cross_entropy,
        l1_per_slot=l1,
        acceptance=acceptance,
        confidence_per_slot=binary,
    )
