"""The training loss of the compact draft: cross entropy, distance to the target's distribution, and confidence."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

_CROSS_ENTROPY, _DISTANCE, _CONFIDENCE = 0.1, 0.9, 1.0
_CLIP = 1e-6


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class CompactLoss:
    """`total` and what it is made of. Scalars are means over anchors of the weighted sum over slots; the weights are
    not normalised.
    """

    total: Float[Array, ""]
    cross_entropy: Float[Array, ""]
    distance: Float[Array, ""]
    confidence: Float[Array, ""]
    weights: Float[Array, "W"]  # exp(-k / W)
    cross_entropy_per_slot: Float[Array, "A W"]
    l1_per_slot: Float[Array, "A W"]  # the whole sum of |p_draft - p_target|, twice the total variation
    # 1 - l1 / 2: the probability that the target accepts the slot. The label of the confidence; no gradient.
    acceptance: Float[Array, "A W"]
    confidence_per_slot: Float[Array, "A W"]

    @property
    def acceptance_per_slot(self) -> Float[Array, "W"]:
        """Mean over anchors."""
        return jnp.mean(self.acceptance, axis=0)

    @property
    def tau_per_anchor(self) -> Float[Array, "A"]:
        """Expected tokens of a round, the target's own included: 1 + sum over slots of the chance that all slots up to
        it are accepted.
        """
        return 1 + jnp.sum(jnp.cumprod(self.acceptance, axis=-1), axis=-1)


def compact_loss(
    draft_logits: Float[Array, "A W V"],
    confidence: Float[Array, "A W"],
    target_logits: Float[Array, "A W V"],
    labels: Int32[Array, "A W"],
) -> CompactLoss:
    """The loss of `CompactDraft.forward_train`'s two outputs.

    `target_logits` are the target's at the rows that predict `labels` (soft-cap included), a constant here. The label
    of the confidence is a constant too; its features are not detached, so the confidence term reaches the backbone and
    W1.
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
