"""The interfaces of a target and of a draft, as the compiled round uses them.

The round imports no model, and no model imports the round.

Axis letters: `T` flat tokens, `B` rows, `H` target hidden size, `d` draft hidden size, `V` target vocabulary, `Vd`
draft vocabulary, `m` taps (`mH` is their concatenation), `W` block slots, `Ws` slots that states are computed for, `Ds`
drafts that these slots propose: `Ws` if the draft is anchor-first, `Ws - 1` if it is fill-in.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from jaxtyping import Array, Float, Int32

from dspark_jax.architectures.nn.attention.block_context import BlockContext
from dspark_jax.architectures.nn.attention.kv_cache import KVCache
from dspark_jax.architectures.nn.attention.kv_params import KVParams
from dspark_jax.architectures.nn.attention.ragged_batch import RaggedBatch
from dspark_jax.architectures.proposal import Proposal, Sampler
from dspark_jax.architectures.target_config import TargetConfig
from dspark_jax.speculators_common.formats.draft_config import DraftConfig


@runtime_checkable
class TargetTables(Protocol):
    """The embedding and the head of a target. A draft that has none of its own uses these."""

    def embed_tokens(self, ids: Int32[Array, "*axes"]) -> Float[Array, "*axes H"]:
        """Embedding rows as they are stored, without the scaling that some targets apply to their own input."""
        ...

    def lm_head(self, hidden: Float[Array, "*axes H"]) -> Float[Array, "*axes V"]:
        """Hidden states times the head, float32, without the soft-cap."""
        ...

    def compute_logits(self, hidden: Float[Array, "*axes H"]) -> Float[Array, "*axes V"]:
        """Logits of hidden states after the final norm, float32, with the soft-cap."""
        ...


@runtime_checkable
class Target(TargetTables, Protocol):
    """The model that decides which drafts are accepted."""

    @property
    def config(self) -> TargetConfig:
        """The sizes of the target, and the file that states them."""
        ...

    def kv_params(self, page_size: int) -> KVParams:
        """Geometry of the KV cache that `forward` reads and writes; `page_size` is in positions."""
        ...

    def forward(
        self, batch: RaggedBatch, cache: KVCache, taps: tuple[int, ...]
    ) -> tuple[Float[Array, "T H"], Float[Array, "T mH"], KVCache]:
        """Run the target over `batch`.

        Returns the hidden states after the final norm, the tapped residual streams, and the cache with the keys and
        values of the batch stored at its positions. Tap `j` is the residual stream after `j` layers, and tap 0 is the
        embedding output. The streams are concatenated in the order of `taps`.
        """
        ...


@runtime_checkable
class Draft(Protocol):
    """The model that proposes tokens. A draft without an embedding or a head of its own uses those of `target`."""

    config: DraftConfig

    @property
    def target_ids(self) -> Int32[Array, "Vd"] | None:
        """The target id of every draft id; `None` if they are the same."""
        ...

    def kv_params(self, page_size: int) -> KVParams:
        """Geometry of the draft's KV cache, which holds the context only; `page_size` is in positions."""
        ...

    def project_target_hidden(self, taps: Float[Array, "T mH"]) -> Float[Array, "T d"]:
        """Context features `hidden_norm(fc(taps))` of concatenated taps."""
        ...

    def materialize_kv(self, context: Float[Array, "T d"], batch: RaggedBatch, cache: KVCache) -> KVCache:
        """The cache with the context K/V of `batch` stored at its absolute positions. Inert tokens are not stored."""
        ...

    def embed_block(self, anchor: Int32[Array, "B"], target: TargetTables) -> Float[Array, "B W d"]:
        """The inputs of a block, `[anchor, mask, mask, ...]`, one row per slot."""
        ...

    def forward_block(
        self, embeds: Float[Array, "B W d"], context: BlockContext, num_slots: int | None = None
    ) -> Float[Array, "B Ws d"]:
        """Hidden states after the final norm, of the first `num_slots` slots (default: all).

        The anchor is at position `context.lengths`, slot k is k positions later. The block's own K/V is never stored.
        """
        ...

    def compute_logits(self, hidden: Float[Array, "B Ws d"], target: TargetTables) -> Float[Array, "B Ds Vd"]:
        """Base logits of the slots that propose a draft, float32, before the Markov bias.

        A fill-in draft drops slot 0.
        """
        ...

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
        `forward_block`; gated and rnn Markov heads need them.
        """
        ...

    def predict_confidence(
        self, hidden: Float[Array, "B Ws d"], anchor_tokens: Int32[Array, "B"], drafts: Int32[Array, "B Ds"]
    ) -> Float[Array, "B Ds"] | None:
        """Confidence logits of the slots that propose a draft, float32; `None` if there is no confidence head."""
        ...

    def proposal_length(self, confidence: Float[Array, "B Ds"], threshold: Float[Array, "B"]) -> Int32[Array, "B"]:
        """The number of drafts to verify in each row, by the confidence logits.

        `threshold` is the confidence, a probability, that the request of the row states. At 0 the draft decides.
        """
        ...

    def propose(
        self,
        hidden: Float[Array, "B Ws d"],
        base_logits: Float[Array, "B Ds Vd"],
        anchor_tokens: Int32[Array, "B"],
        threshold: Float[Array, "B"],
        sampler: Sampler | None = None,
    ) -> Proposal:
        """The proposal of a block: `sample_draft_tokens`, `predict_confidence` and `proposal_length` together."""
        ...
