"""What the compiled round needs of a target and of a draft. The round imports no model; a model imports no round."""

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
    """The embedding and head of a target. A draft without its own uses them."""

    def embed_tokens(self, ids: Int32[Array, "*axes"]) -> Float[Array, "*axes H"]:
        """Embedding rows as stored: no scaling."""
        ...

    def lm_head(self, hidden: Float[Array, "*axes H"]) -> Float[Array, "*axes V"]:
        """Raw head product, float32: no soft-cap."""
        ...

    def compute_logits(self, hidden: Float[Array, "*axes H"]) -> Float[Array, "*axes V"]:
        """Logits of final-normed hidden states, float32, soft-cap included."""
        ...


@runtime_checkable
class Target(TargetTables, Protocol):
    """The model that decides."""

    @property
    def config(self) -> TargetConfig:
        """Its sizes and where they are from."""
        ...

    def kv_params(self, page_size: int) -> KVParams:
        """Geometry of the cache that `forward` writes."""
        ...

    def forward(
        self, batch: RaggedBatch, cache: KVCache, taps: tuple[int, ...]
    ) -> tuple[Float[Array, "T H"], Float[Array, "T mH"], KVCache]:
        """Run the batch: final-normed hidden states, the tapped residual streams side by side, and the cache with the
        batch written at its positions.
        """
        ...


@runtime_checkable
class Draft(Protocol):
    """The model that proposes. A draft without its own embedding or head uses those of `target`."""

    config: DraftConfig

    def kv_params(self, page_size: int) -> KVParams:
        """Geometry of the draft's context cache."""
        ...

    def project_target_hidden(self, taps: Float[Array, "T mH"]) -> Float[Array, "T d"]:
        """Taps -> context features, `hidden_norm(fc(taps))`."""
        ...

    def materialize_kv(self, context: Float[Array, "T d"], batch: RaggedBatch, cache: KVCache) -> KVCache:
        """Store the context K/V of every token that is not inert, at its absolute position."""
        ...

    def embed_block(self, anchor: Int32[Array, "B"], target: TargetTables) -> Float[Array, "B W d"]:
        """Block inputs `[anchor, mask, mask, ...]`."""
        ...

    def forward_block(
        self, embeds: Float[Array, "B W d"], context: BlockContext, num_slots: int | None = None
    ) -> Float[Array, "B Ws d"]:
        """Final-normed hidden states of the first `num_slots` slots (all by default); the anchor sits at position
        `context.lengths`. The block's own K/V is never stored.
        """
        ...

    def compute_logits(self, hidden: Float[Array, "B Ws d"], target: TargetTables) -> Float[Array, "B Ds Vd"]:
        """Base logits of the drafting slots, float32, before the Markov bias; slot 0 is dropped when fill-in."""
        ...

    def sample_draft_tokens(
        self,
        base_logits: Float[Array, "B Ds Vd"],
        anchor_tokens: Int32[Array, "B"],
        sampler: Sampler | None = None,
        *,
        hidden: Float[Array, "B Ws d"] | None = None,
    ) -> Int32[Array, "B Ds"]:
        """The Markov chain: drafts as target ids."""
        ...

    def predict_confidence(
        self, hidden: Float[Array, "B Ws d"], anchor_tokens: Int32[Array, "B"], drafts: Int32[Array, "B Ds"]
    ) -> Float[Array, "B Ds"] | None:
        """Confidence logits of the drafting slots, float32; `None` without a head."""
        ...

    def proposal_length(self, confidence: Float[Array, "B Ds"], threshold: Float[Array, "B"]) -> Int32[Array, "B"]:
        """Drafts to verify, given the confidence logits. `threshold` is what the row's request asks for; 0 leaves the
        decision to the draft.
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
        """All of the above at once: the drafts of a block and how many of them are offered."""
        ...
