"""The part of a draft after its backbone: the Markov chain over the slots, their confidences, the proposal's length."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from dspark_jax.architectures.drafting.tables import DraftTables
from dspark_jax.architectures.proposal import Proposal, Sampler
from dspark_jax.architectures.protocols import TargetTables
from dspark_jax.speculators_common.formats.draft_config import DraftConfig
from dspark_jax.speculators_common.heads.confidence_head import ConfidenceHead, confident_length
from dspark_jax.speculators_common.heads.markov_head import MarkovHead
from dspark_jax.speculators_common.numerics.argmax import argmax
from dspark_jax.speculators_common.numerics.platform import Platform


class VocabTable(nnx.Variable):
    """The target id of every draft id, int32 `[Vd]`. It is not a trained parameter."""


class ChainOutput(NamedTuple):
    """The drafts of a block as target ids, and what they were chosen by."""

    drafts: Int32[Array, "B Ds"]
    logits: Float[Array, "B Ds Vd"]  # Markov bias included
    chosen: Float[Array, "B Ds"]  # logits of the drafts


class DraftChain(nnx.Module):
    """The part of a `Draft` (see `architectures/protocols.py`) that turns base logits into a proposal.

    The backbone of every draft derives from this class and sets these fields.
    """

    config: DraftConfig
    tables: DraftTables
    platform: Platform
    markov_head: MarkovHead | None
    confidence_head: ConfidenceHead | None
    draft_to_target: VocabTable | None

    @property
    def target_ids(self) -> Int32[Array, "Vd"] | None:
        """The target id of every draft id; `None` if they are the same."""
        return None if self.draft_to_target is None else self.draft_to_target[...]

    def sample_draft_tokens(
        self,
        base_logits: Float[Array, "B Ds Vd"],
        anchor_tokens: Int32[Array, "B"],
        sampler: Sampler | None = None,
        *,
        hidden: Float[Array, "B Ws d"] | None = None,
    ) -> Int32[Array, "B Ds"]:
        """Drafts as target ids, chosen from left to right: each slot adds the Markov bias of the token before it.

        `sampler(logits, slot)` chooses the draft ids of one slot; `None` takes the argmax. `hidden` are the states of
        `forward_block`. Gated and rnn Markov heads need them: without them they raise `ValueError`.
        """
        return self.draft_chain(base_logits, anchor_tokens, sampler, hidden=hidden).drafts

    def draft_chain(
        self,
        base_logits: Float[Array, "B Ds Vd"],
        anchor_tokens: Int32[Array, "B"],
        sampler: Sampler | None = None,
        *,
        hidden: Float[Array, "B Ws d"] | None = None,
    ) -> ChainOutput:
        """The drafts of `sample_draft_tokens`, and what they were chosen by."""
        pick = sampler or (lambda logits, slot: argmax(logits, self.platform.argmax))
        head = self.markov_head
        if head is not None and head.needs_hidden and hidden is None:
            raise ValueError(
                f"{self.config.markov_head_type} Markov head: sample_draft_tokens needs the slot states, pass hidden="
            )
        previous, state = anchor_tokens, self._first_state(anchor_tokens, hidden)
        slots = None if hidden is None else self._drafting(hidden)
        drafts, corrected, chosen = [], [], []
        for slot in range(base_logits.shape[1]):
            logits = base_logits[:, slot]
            if head is not None:
                bias, state = head.bias(head.embed(previous), None if slots is None else slots[:, slot], state)
                logits = logits + bias
            ids = pick(logits, slot)
            previous = self._to_target(ids)
            drafts.append(previous)
            corrected.append(logits)
            chosen.append(jnp.take_along_axis(logits, ids[:, None], axis=1)[:, 0])
        return ChainOutput(jnp.stack(drafts, axis=1), jnp.stack(corrected, axis=1), jnp.stack(chosen, axis=1))

    def propose(
        self,
        hidden: Float[Array, "B Ws d"],
        base_logits: Float[Array, "B Ds Vd"],
        anchor_tokens: Int32[Array, "B"],
        threshold: Float[Array, "B"],
        sampler: Sampler | None = None,
    ) -> Proposal:
        """The proposal of a block: `sample_draft_tokens`, `predict_confidence` and `proposal_length` together.

        `hidden` and `base_logits` are the results of `forward_block` and `compute_logits`. Without a confidence head
        all drafts are proposed.
        """
        drafts, _, chosen = self.draft_chain(base_logits, anchor_tokens, sampler, hidden=hidden)
        # An argmax takes NaN for the largest number, so a chosen logit is finite only if no logit of its slot is NaN.
        finite = jnp.all(jnp.isfinite(chosen), axis=1)
        confidence = self.predict_confidence(hidden, anchor_tokens, drafts)
        if confidence is None:
            return Proposal(drafts, jnp.full(anchor_tokens.shape, drafts.shape[1], jnp.int32), finite=finite)
        finite = finite & jnp.all(jnp.isfinite(confidence), axis=1)
        return Proposal(drafts, self.proposal_length(confidence, threshold), finite=finite)

    def predict_confidence(
        self, hidden: Float[Array, "B Ws d"], anchor_tokens: Int32[Array, "B"], drafts: Int32[Array, "B Ds"]
    ) -> Float[Array, "B Ds"] | None:
        """Confidence logits of the slots that propose a draft, float32; `None` if there is no confidence head."""
        if self.confidence_head is None:
            return None
        return self.teacher_forced_confidence(hidden, jnp.concatenate([anchor_tokens[:, None], drafts[:, :-1]], axis=1))

    def teacher_forced_confidence(
        self, hidden: Float[Array, "B Ws d"], previous: Int32[Array, "B Ds"]
    ) -> Float[Array, "B Ds"]:
        """Confidence logits with the token before every slot given, as in training. It needs a confidence head."""
        assert self.confidence_head is not None
        reads_markov = self.config.confidence_head_with_markov and self.markov_head is not None
        embedded = self.markov_head.embed(previous) if reads_markov and self.markov_head is not None else None
        return self.confidence_head(self._drafting(hidden), embedded)

    def proposal_length(self, confidence: Float[Array, "B Ds"], threshold: Float[Array, "B"]) -> Int32[Array, "B"]:
        """The number of drafts to verify: those before the first slot whose confidence is below the row's `threshold`.

        `confidence` are logits, `threshold` is a probability; 0 keeps all drafts.
        """
        return confident_length(confidence, threshold)

    def teacher_forced_logits(
        self,
        base_logits: Float[Array, "B Ds Vd"],
        previous: Int32[Array, "B Ds"],
        *,
        hidden: Float[Array, "B Ws d"] | None = None,
    ) -> Float[Array, "B Ds Vd"]:
        """Base logits plus Markov bias with the token before every slot given, as in training.

        `hidden` are the states of `forward_block`; gated and rnn Markov heads need them.
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
        """The states of the slots that propose a draft: all but slot 0 in a fill-in draft."""
        return hidden if self.config.sample_from_anchor else hidden[:, 1:]

    def _first_state(
        self, anchor: Int32[Array, "B"], hidden: Float[Array, "B Ws d"] | None
    ) -> Float[Array, "B r"] | None:
        """The recurrent state of the Markov head before the first draft; `None` if it has none.

        A fill-in draft updates the state with slot 0 first, as in training.
        """
        if self.markov_head is None:
            return None
        state = self.markov_head.initial_state(anchor.shape[0])
        if state is None or self.config.sample_from_anchor or hidden is None:
            return state
        return self.markov_head.bias(self.markov_head.embed(anchor), hidden[:, 0], state)[1]

    def _to_target(self, draft_ids: Int32[Array, "B"]) -> Int32[Array, "B"]:
        return draft_ids if self.draft_to_target is None else self.draft_to_target[...][draft_ids]


def required_target(target: TargetTables | None, what: str) -> TargetTables:
    """The target, for a draft without a `what` (embedding or head) of its own. Raises `ValueError` if it is `None`."""
    if target is None:
        raise ValueError(f"this draft has no {what} of its own: pass the target as `target`")
    return target
