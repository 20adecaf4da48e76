"""Draws the drafts of a block, and keeps the distributions that they were drawn from for the acceptance rule."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from dspark_jax.architectures.proposal import Proposal
from dspark_jax.pipelines.sampling.controls import Controls
from dspark_jax.pipelines.sampling.draws import Purpose, Uniforms, row_sums, weighted_choice
from dspark_jax.speculators_common.numerics.argmax import argmax
from dspark_jax.speculators_common.numerics.platform import ArgmaxForm


class DraftSampler:
    """A `Sampler`: draws the draft id of every row for one slot after the other. For one block, while it is traced.

    The draft of slot i is drawn with the request's temperature and the random numbers of its position. Rows of
    temperature 0 get the argmax.
    """

    def __init__(
        self, controls: Controls, anchor_positions: Int32[Array, "B"], num_drafts: int, form: ArgmaxForm
    ) -> None:
        """`anchor_positions` are P: draft i is for position `P + 1 + i`."""
        rows = anchor_positions.shape[0]
        positions = anchor_positions[:, None] + 1 + jnp.arange(num_drafts, dtype=jnp.int32)[None]
        seeds = jnp.repeat(controls.seed, num_drafts, axis=0)
        self._numbers = Uniforms(seeds, positions.reshape(-1)).pair(Purpose.DRAFT_CHOICE).reshape(rows, num_drafts, 2)
        self._temperature, self._form = controls.temperature, form
        self._probabilities: list[Float[Array, "B Vd"]] = []
        self._drawn: list[Float[Array, "B"]] = []

    def __call__(self, logits: Float[Array, "B Vd"], slot: int) -> Int32[Array, "B"]:
        """The draft ids of one slot."""
        sampled = self._temperature > 0
        distance = jnp.max(logits, axis=1, keepdims=True) - logits
        weights = jnp.exp(-distance / jnp.where(sampled, self._temperature, 1.0)[:, None])
        probabilities = weights / row_sums(weights)[:, None]
        drawn = weighted_choice(probabilities, self._numbers[:, slot])
        ids = jnp.where(sampled, drawn, argmax(logits, self._form))
        self._probabilities.append(probabilities)
        self._drawn.append(jnp.take_along_axis(probabilities, ids[:, None], axis=1)[:, 0])
        return ids

    def completed(self, proposal: Proposal) -> Proposal:
        """The proposal with the distributions of its drafts."""
        drawn = jnp.stack(self._drawn, axis=1)
        finite = jnp.all(jnp.isfinite(drawn), axis=1)
        return proposal._replace(
            probabilities=jnp.stack(self._probabilities, axis=1),
            token_probabilities=drawn,
            finite=finite if proposal.finite is None else proposal.finite & finite,
        )
