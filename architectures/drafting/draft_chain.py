"""What follows a draft's backbone, whatever that is: the Markov chain over the slots, the confidence of each, and the
proposal's length.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from dspark_jax.architectures.proposal import Proposal, Sampler
from dspark_jax.architectures.protocols import TargetTables
from dspark_jax.speculators_common.formats.draft_config import DraftConfig
from dspark_jax.speculators_common.heads.confidence_head import ConfidenceHead, confident_length
from dspark_jax.speculators_common.heads.markov_head import MarkovHead
from dspark_jax.speculators_common.numerics.argmax import argmax
from dspark_jax.speculators_common.numerics.platform import Platform


class VocabTable(nnx.Variable):
    """Absolute target ids of the draft vocabulary, int32 `[Vd]`; not a trained parameter."""


class DraftChain(nnx.Module):
    """The half of a `Draft` (see `architectures/protocols.py`) that turns base logits into a proposal.

    A backbone derives from it and sets the fields.
    """

    config: DraftConfig
    platform: Platform
    markov_head: MarkovHead | None
    confidence_head: ConfidenceHead | None
    draft_to_target: VocabTable | None

    def sample_draft_tokens(
        self,
        base_logits: Float[Array, "B Ds Vd"],
        anchor_tokens: Int32[Array, "B"],
        sampler: Sampler | None = None,
        *,
        hidden: Float[Array, "B Ws d"] | None = None,
    ) -> Int32[Array, "B Ds"]:
        """The Markov chain, unrolled over the slots: drafts as target ids.

        `sampler(logits [B, Vd], slot)` picks draft ids, argmax by default. `hidden` are the slot states of
        `forward_block`; gated and rnn heads read them.
        """
        return self.draft_chain(base_logits, anchor_tokens, sampler, hidden=hidden)[0]

    def draft_chain(
        self,
        base_logits: Float[Array, "B Ds Vd"],
        anchor_tokens: Int32[Array, "B"],
        sampler: Sampler | None = None,
        *,
        hidden: Float[Array, "B Ws d"] | None = None,
    ) -> tuple[Int32[Array, "B Ds"], Float[Array, "B Ds Vd"]]:
        """`sample_draft_tokens`, and the corrected logits each draft was chosen from."""
        pick = sampler or (lambda logits, slot: argmax(logits, self.platform.argmax))
        head = self.markov_head
        if head is not None and head.needs_hidden and hidden is None:
            raise ValueError(
                f"{self.config.markov_head_type} Markov head: sample_draft_tokens needs the slot states, pass hidden="
            )
        previous, state = anchor_tokens, self._first_state(anchor_tokens, hidden)
        slots = None if hidden is None else self._drafting(hidden)
        drafts, corrected = [], []
        for slot in range(base_logits.shape[1]):
            logits = base_logits[:, slot]
            if head is not None:
                bias, state = head.bias(head.embed(previous), None if slots is None else slots[:, slot], state)
                logits = logits + bias
            previous = self._to_target(pick(logits, slot))
            drafts.append(previous)
            corrected.append(logits)
        return jnp.stack(drafts, axis=1), jnp.stack(corrected, axis=1)

    def propose(
        self,
        hidden: Float[Array, "B Ws d"],
        base_logits: Float[Array, "B Ds Vd"],
        anchor_tokens: Int32[Array, "B"],
        threshold: Float[Array, "B"],
        sampler: Sampler | None = None,
    ) -> Proposal:
        """The Markov chain, the confidences, and the cut at the row's confidence `threshold` (0: as the draft decides).

        `hidden` and `base_logits` are those of `forward_block` and `compute_logits`; `sampler` as in
        `sample_draft_tokens`.
        """
        drafts = self.sample_draft_tokens(base_logits, anchor_tokens, sampler, hidden=hidden)
        confidence = self.predict_confidence(hidden, anchor_tokens, drafts)
        length = jnp.full(anchor_tokens.shape, drafts.shape[1], jnp.int32)
        return Proposal(drafts, length if confidence is None else self.proposal_length(confidence, threshold))

    def predict_confidence(
        self, hidden: Float[Array, "B Ws d"], anchor_tokens: Int32[Array, "B"], drafts: Int32[Array, "B Ds"]
    ) -> Float[Array, "B Ds"] | None:
        """Confidence logits of the drafting slots, float32; `None` without a head."""
        if self.confidence_head is None:
            return None
        return self.teacher_forced_confidence(hidden, jnp.concatenate([anchor_tokens[:, None], drafts[:, :-1]], axis=1))

    def teacher_forced_confidence(
        self, hidden: Float[Array, "B Ws d"], previous: Int32[Array, "B Ds"]
    ) -> Float[Array, "B Ds"]:
        """`predict_confidence` with the previous token of every slot given; needs a head."""
        assert self.confidence_head is not None
        reads_markov = self.config.confidence_head_with_markov and self.markov_head is not None
        embedded = self.markov_head.embed(previous) if reads_markov and self.markov_head is not None else None
        return self.confidence_head(self._drafting(hidden), embedded)

    def proposal_length(self, confidence: Float[Array, "B Ds"], threshold: Float[Array, "B"]) -> Int32[Array, "B"]:
        """Drafts to verify: up to the first slot whose confidence is below the row's `threshold`; all of them at 0."""
        return confident_length(confidence, threshold)

    def teacher_forced_logits(
        self,
        base_logits: Float[Array, "B Ds Vd"],
        previous: Int32[Array, "B Ds"],
        *,
        hidden: Float[Array, "B Ws d"] | None = None,
    ) -> Float[Array, "B Ds Vd"]:
        """The corrected logits of every drafting slot when its previous token is given instead of drafted, as training
        does.
        """
        head = self.markov_head
        if head is None:
            return base_logits
        state = self._first_state(previous[:, 0], hidden)
        slots = None if hidden is None else self._drafting(hidden)
        corrected = []
        for slot in range(base_logits.shape[1]):
            bias, state = head.bias(head.embed(previous[:, slot]), None if slots is None else slots[:, slot], state)
            corrected.append(base_logits[:, slot] + bias)
        return jnp.stack(corrected, axis=1)

    def _drafting(self, hidden: Float[Array, "B Ws d"]) -> Float[Array, "B Ds d"]:
        return hidden if self.config.sample_from_anchor else hidden[:, 1:]

    def _first_state(
        self, anchor: Int32[Array, "B"], hidden: Float[Array, "B Ws d"] | None
    ) -> Float[Array, "B r"] | None:
        """A fill-in block steps the recurrent state once through slot 0, as training does."""
        if self.markov_head is None:
            return None
        state = self.markov_head.initial_state(anchor.shape[0])
        if state is None or self.config.sample_from_anchor or hidden is None:
            return state
        return self.markov_head.bias(self.markov_head.embed(anchor), hidden[:, 0], state)[1]

    def _to_target(self, draft_ids: Int32[Array, "B"]) -> Int32[Array, "B"]:
        return draft_ids if self.draft_to_target is None else self.draft_to_target[...][draft_ids]


def required_target(target: TargetTables | None, what: str) -> TargetTables:
    """The target whose tables a draft uses, for a draft that has no `what` of its own. Raises `ValueError` if it was
    not handed in.
    """
    if target is None:
        raise ValueError(f"this draft brings no {what} of its own: pass the target as `target`")
    return target
