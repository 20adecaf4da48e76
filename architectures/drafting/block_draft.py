"""The Qwen3-style block draft: the network behind the speculators and the DeepSpec Qwen3 formats (`docs/how-it-works.md`).

One parallel pass over `[anchor, mask, mask, ...]` reads context K/V made from the target's taps; a Markov head then samples the slots left to right.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from dspark_jax.architectures.drafting.block_layer import BlockLayer
from dspark_jax.architectures.drafting.tables import DraftTables
from dspark_jax.architectures.nn.argmax import argmax
from dspark_jax.architectures.nn.embedding import Head, TokenTable
from dspark_jax.architectures.nn.kv_cache import KVCache, KVParams
from dspark_jax.architectures.nn.linear import Linear
from dspark_jax.architectures.nn.norms import RMSNorm
from dspark_jax.architectures.nn.ragged_batch import RaggedBatch
from dspark_jax.architectures.nn.rotary import rotary_angles
from dspark_jax.architectures.protocols import TableLender
from dspark_jax.speculators_common.confidence_head import ConfidenceHead
from dspark_jax.speculators_common.draft_config import DraftConfig
from dspark_jax.speculators_common.markov_head import make_markov_head

Sampler = Callable[[Float[Array, "B Vd"], int], Int32[Array, "B"]]


class VocabTable(nnx.Variable):
    """Absolute target ids of the draft vocabulary, int32 `[Vd]`; not a trained parameter."""


class BlockDraft(nnx.Module):
    """A `Draft` (see `architectures/protocols.py`) for any `DraftConfig` of the Qwen3 style."""

    def __init__(
        self, config: DraftConfig, *, dtype: DTypeLike = jnp.float32, tables: DraftTables | None = None, rngs: nnx.Rngs | None = None
    ) -> None:
        rngs = rngs or nnx.Rngs(0)
        self.config, self.tables, self.dtype = config, tables or DraftTables(), jnp.dtype(dtype)
        hidden = config.hidden_size
        self.table = TokenTable(config.vocab_size, hidden, dtype=dtype, rngs=rngs) if self.tables.embed_tokens == "own" else None
        self.fc = Linear(config.num_taps * config.target_hidden_size, hidden, dtype=dtype, rngs=rngs)
        self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.layers = nnx.List(BlockLayer(config, layer, dtype=dtype, rngs=rngs) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.head = None if self.tables.lm_head == "target" else Head(config.num_draft_ids, hidden, dtype=dtype, rngs=rngs)
        self.markov_head = make_markov_head(config, dtype=dtype, rngs=rngs)
        self.confidence_head = ConfidenceHead(config, rngs=rngs) if config.enable_confidence_head else None
        self.draft_to_target = VocabTable(jnp.arange(config.num_draft_ids, dtype=jnp.int32)) if config.is_pruned else None

    @property
    def has_own_embed_tokens(self) -> bool:
        """Whether the checkpoint brings an embedding of its own."""
        return self.tables.embed_tokens == "own"

    @property
    def has_own_lm_head(self) -> bool:
        """Whether the checkpoint brings a head of its own."""
        return self.tables.lm_head == "own"

    def kv_params(self, page_size: int) -> KVParams:
        """Geometry of the context cache."""
        config = self.config
        return KVParams(
            num_layers=config.num_hidden_layers,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            page_size=page_size,
            dtype=self.dtype,
        )

    def project_target_hidden(self, taps: Float[Array, "*axes mH"]) -> Float[Array, "*axes d"]:
        """Context features `hidden_norm(fc(taps))`; they feed context K/V only."""
        return self.hidden_norm(self.fc.wide(taps))

    def materialize_kv(self, context: Float[Array, "T d"], batch: RaggedBatch, cache: KVCache) -> KVCache:
        """Store each layer's context K/V at the absolute positions of `batch`; inert tokens store nothing.

        Context features skip the layer's input norm, block rows do not.
        """
        angles = rotary_angles(batch.positions, self.config.rope)
        for index, layer in enumerate(self.layers):
            cache = cache.write(index, batch, *layer.attention.keys_values(context, angles))
        return cache

    def embed_block(self, anchor: Int32[Array, "B"], lender: TableLender | None = None) -> Float[Array, "B W d"]:
        """Raw embedding rows of `[anchor, mask, mask, ...]`, float32: the block's residual stream."""
        embed = self.table if self.table is not None else _lent(lender, "embed_tokens").embed_tokens
        width = self.config.block_size
        ids = jnp.concatenate([anchor[:, None], jnp.full((anchor.shape[0], 1), self.config.mask_token_id, jnp.int32)], axis=1)
        rows = embed(ids)
        masks = jnp.broadcast_to(rows[:, 1:], (rows.shape[0], width - 1, rows.shape[2]))
        return jnp.concatenate([rows[:, :1], masks], axis=1).astype(jnp.float32)

    def forward_block(self, embeds: Float[Array, "B W d"], cache: KVCache, num_slots: int | None = None) -> Float[Array, "B Ws d"]:
        """Final-normed hidden states of the first `num_slots` slots; slot k stands at position `cache.lengths + k`.

        All W slots always run: in a bidirectional block every slot sees every other. Only the last layer's queries are cut.
        """
        width = embeds.shape[1]
        positions = cache.lengths[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
        angles = rotary_angles(positions, self.config.rope)
        x = embeds
        for index, layer in enumerate(self.layers):
            last = index == len(self.layers) - 1
            with jax.named_scope(f"draft_layer{index}"):
                x = layer(x, angles, cache, (num_slots or width) if last else width)
        return self.norm(x)

    def compute_logits(self, hidden: Float[Array, "B Ws d"], lender: TableLender | None = None) -> Float[Array, "B Ds Vd"]:
        """Base logits of the drafting slots, float32, without Markov bias; fill-in drafts drop slot 0."""
        head = self.head if self.head is not None else _lent(lender, "lm_head").lm_head
        return head(self._drafting(hidden))

    def sample_draft_tokens(
        self,
        base_logits: Float[Array, "B Ds Vd"],
        anchor_tokens: Int32[Array, "B"],
        sampler: Sampler | None = None,
        *,
        hidden: Float[Array, "B Ws d"] | None = None,
    ) -> Int32[Array, "B Ds"]:
        """The Markov chain, unrolled over the slots: drafts as target ids.

        `sampler(logits [B, Vd], slot)` picks draft ids, argmax by default. `hidden` are the slot states of `forward_block`; gated and rnn heads
        read them.
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
        pick = sampler or (lambda logits, slot: argmax(logits))
        head = self.markov_head
        if head is not None and head.needs_hidden and hidden is None:
            raise ValueError(f"{self.config.markov_head_type} Markov head: sample_draft_tokens needs the slot states, pass hidden=")
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

    def predict_confidence(
        self, hidden: Float[Array, "B Ws d"], anchor_tokens: Int32[Array, "B"], drafts: Int32[Array, "B Ds"]
    ) -> Float[Array, "B Ds"] | None:
        """Confidence logits of the drafting slots, float32; `None` without a head."""
        if self.confidence_head is None:
            return None
        previous = jnp.concatenate([anchor_tokens[:, None], drafts[:, :-1]], axis=1)
        reads_markov = self.config.confidence_head_with_markov and self.markov_head is not None
        embedded = self.markov_head.embed(previous) if reads_markov and self.markov_head is not None else None
        return self.confidence_head(self._drafting(hidden), embedded)

    def _drafting(self, hidden: Float[Array, "B Ws d"]) -> Float[Array, "B Ds d"]:
        return hidden if self.config.sample_from_anchor else hidden[:, 1:]

    def _first_state(self, anchor: Int32[Array, "B"], hidden: Float[Array, "B Ws d"] | None) -> Float[Array, "B r"] | None:
        """A fill-in block steps the recurrent state once through slot 0, as training does."""
        if self.markov_head is None:
            return None
        state = self.markov_head.initial_state(anchor.shape[0])
        if state is None or self.config.sample_from_anchor or hidden is None:
            return state
        return self.markov_head.bias(self.markov_head.embed(anchor), hidden[:, 0], state)[1]

    def _to_target(self, draft_ids: Int32[Array, "B"]) -> Int32[Array, "B"]:
        return draft_ids if self.draft_to_target is None else self.draft_to_target[...][draft_ids]


def _lent(lender: TableLender | None, what: str) -> TableLender:
    if lender is None:
        raise ValueError(f"this draft brings no {what} of its own: pass the target as lender")
    return lender
