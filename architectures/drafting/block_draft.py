"""The block draft: the network of every draft format except the compact one (`docs/how-it-works.md`).

It is the draft of the DSpark paper (arXiv 2607.05147), as the speculators library and DeepSpec publish it. One parallel
pass over `[anchor, mask, mask, ...]` attends to context K/V that is made from the target's taps. The Markov head then
chooses the drafts slot by slot, from left to right.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from dspark_jax.architectures.drafting.block_layer import BlockLayer
from dspark_jax.architectures.drafting.draft_chain import DraftChain, VocabTable, required_target
from dspark_jax.architectures.drafting.tables import DraftTables
from dspark_jax.architectures.nn.attention.block_context import BlockContext
from dspark_jax.architectures.nn.attention.kv_cache import KVCache
from dspark_jax.architectures.nn.attention.kv_params import KVParams
from dspark_jax.architectures.nn.attention.ragged_batch import RaggedBatch
from dspark_jax.architectures.nn.embedding import TokenTable, soft_capped
from dspark_jax.architectures.nn.norms import RMSNorm
from dspark_jax.architectures.nn.rotary import Angles, rotary_angles
from dspark_jax.architectures.protocols import TargetTables
from dspark_jax.speculators_common.formats.draft_checks import check_block_draft
from dspark_jax.speculators_common.formats.draft_config import DraftConfig, DraftStyle
from dspark_jax.speculators_common.heads.confidence_head import ConfidenceHead
from dspark_jax.speculators_common.heads.markov_head import make_markov_head
from dspark_jax.speculators_common.numerics.linear import Linear
from dspark_jax.speculators_common.numerics.platform import Platform, default_platform


class BlockDraft(DraftChain):
    """A `Draft` (see `architectures/protocols.py`) for any `DraftConfig` of the Qwen3 style.

    A subclass for another style sets `layer_type` and `style`. `tables` says whether the embedding and the head are the
    draft's own. The constructor raises `DSparkError` for a config that such a draft cannot have.
    """

    layer_type: ClassVar[type[BlockLayer]] = BlockLayer
    style: ClassVar[DraftStyle] = "qwen3"

    def __init__(
        self,
        config: DraftConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        tables: DraftTables | None = None,
        platform: Platform | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        check_block_draft(config, config.source or type(self).__name__, style=self.style)
        self.platform = platform = platform or default_platform()
        rngs = rngs or nnx.Rngs(0)
        self.config, self.tables, self.dtype = config, tables or DraftTables(), jnp.dtype(dtype)
        hidden = config.hidden_size
        self.table = (
            TokenTable(config.vocab_size, hidden, dtype=dtype, platform=platform, rngs=rngs)
            if self.tables.embed_tokens == "own"
            else None
        )
        self.fc = Linear(config.num_taps * config.target_hidden_size, hidden, dtype=dtype, platform=platform, rngs=rngs)
        self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.layers = nnx.List(
            self.layer_type(config, layer, dtype=dtype, platform=platform, rngs=rngs)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.head = (
            None
            if self.tables.lm_head == "target"
            else Linear(hidden, config.num_draft_ids, dtype=dtype, platform=platform, rngs=rngs)
        )
        self.markov_head = make_markov_head(config, dtype=dtype, platform=platform, rngs=rngs)
        self.confidence_head = (
            ConfidenceHead(config, platform=platform, rngs=rngs) if config.enable_confidence_head else None
        )
        self.draft_to_target = (
            VocabTable(jnp.arange(config.num_draft_ids, dtype=jnp.int32)) if config.is_pruned else None
        )

    @property
    def has_own_embed_tokens(self) -> bool:
        """Whether the draft has an embedding of its own."""
        return self.tables.embed_tokens == "own"

    @property
    def has_own_lm_head(self) -> bool:
        """Whether the draft has a head of its own."""
        return self.tables.lm_head == "own"

    def kv_params(self, page_size: int) -> KVParams:
        """Geometry of the draft's KV cache, which holds the context only; `page_size` is in positions."""
        config = self.config
        return KVParams(
            num_layers=config.num_hidden_layers,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            page_size=page_size,
            dtype=self.dtype,
            platform=self.platform,
        )

    def project_target_hidden(self, taps: Float[Array, "*axes mH"]) -> Float[Array, "*axes d"]:
        """Context features `hidden_norm(fc(taps))` of concatenated taps. Only context K/V is made from them."""
        return self.hidden_norm(self.fc.float32(taps))

    def materialize_kv(self, context: Float[Array, "T d"], batch: RaggedBatch, cache: KVCache) -> KVCache:
        """The cache with each layer's context K/V stored at the positions of `batch`. Inert tokens are not stored.

        The layer's input norm applies to the block only, not to context features.
        """
        angles = rotary_angles(batch.positions, self.config.rope)
        for index, layer in enumerate(self.layers):
            cache = cache.write(index, batch, *layer.attention.keys_values(context, angles))
        return cache

    def embed_block(self, anchor: Int32[Array, "B"], target: TargetTables | None = None) -> Float[Array, "B W d"]:
        """Embedding rows of `[anchor, mask, mask, ...]` times `embedding_scale`, float32: the block's residual stream.

        Raises `ValueError` if the draft has no embedding of its own and `target` is `None`.
        """
        embed = self.table if self.table is not None else required_target(target, "embed_tokens").embed_tokens
        assert self.config.mask_token_id is not None
        ids = jnp.concatenate(
            [anchor[:, None], jnp.full((anchor.shape[0], 1), self.config.mask_token_id, jnp.int32)], axis=1
        )
        rows = embed(ids)
        # The scale is rounded to the dtype of the embedding, as in the training of these drafts and their targets.
        rows = rows.astype(jnp.float32) * np.asarray(self.config.embedding_scale, rows.dtype).astype(np.float32)
        masks = jnp.broadcast_to(rows[:, 1:], (rows.shape[0], self.config.block_size - 1, rows.shape[2]))
        return jnp.concatenate([rows[:, :1], masks], axis=1)

    def forward_block(
        self, embeds: Float[Array, "B W d"], context: BlockContext, num_slots: int | None = None
    ) -> Float[Array, "B Ws d"]:
        """Hidden states after the final norm, of the first `num_slots` slots (default: all).

        Slot k is at position `context.lengths + k`. All W slots run through every layer but the last, because slots of
        a bidirectional block see each other. In the last layer only `num_slots` slots are queries.
        """
        width, angles = embeds.shape[1], self.block_angles(context)
        x = embeds
        for index, layer in enumerate(self.layers):
            last = index == len(self.layers) - 1
            with jax.named_scope(f"draft_layer{index}"):
                x = layer(x, angles, context, (num_slots or width) if last else width)
        return self.norm(x)

    def block_angles(self, context: BlockContext) -> Angles:
        """The rotation angles of the slots, of which slot k is at position `context.lengths + k`."""
        positions = context.lengths[:, None] + jnp.arange(self.config.block_size, dtype=jnp.int32)[None, :]
        return rotary_angles(positions, self.config.rope)

    def compute_logits(
        self, hidden: Float[Array, "B Ws d"], target: TargetTables | None = None
    ) -> Float[Array, "B Ds Vd"]:
        """Base logits of the slots that propose a draft, float32, before the Markov bias. Fill-in drafts drop slot 0.

        `output_multiplier` and `final_logit_softcapping` of the config apply here. Raises `ValueError` if the draft has
        no head of its own and `target` is `None`.
        """
        head = self.head.float32 if self.head is not None else required_target(target, "lm_head").lm_head
        logits = head(self._drafting(hidden))
        if self.config.output_multiplier != 1:
            logits = logits * self.config.output_multiplier
        return soft_capped(logits, self.config.final_logit_softcapping)
