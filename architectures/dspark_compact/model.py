"""The compact draft: a small trainable network that borrows the target's embedding and head.

Context K/V carry no position and depend on their own row only, so they can be cached, gathered and dropped at will.
Context is strictly before the anchor, in training as in decoding: the caller hands in nothing else
(`training_rows.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32

from dspark_jax.architectures.drafting.dense_rows import DraftRows, dense_context
from dspark_jax.architectures.drafting.draft_chain import DraftChain, required_target
from dspark_jax.architectures.drafting.tables import DraftTables
from dspark_jax.architectures.dspark_compact.layer import CompactLayer
from dspark_jax.architectures.nn.attention.block_context import BlockContext, ContextKV, DenseContext
from dspark_jax.architectures.nn.attention.kv_cache import KVCache
from dspark_jax.architectures.nn.attention.kv_params import KVParams
from dspark_jax.architectures.nn.attention.ragged_batch import PADDING_POSITION, RaggedBatch
from dspark_jax.architectures.nn.norms import RMSNorm
from dspark_jax.architectures.proposal import Sampler
from dspark_jax.architectures.protocols import TargetTables
from dspark_jax.speculators_common.errors import RequestError
from dspark_jax.speculators_common.formats.draft_config import DraftConfig
from dspark_jax.speculators_common.heads.confidence_head import ConfidenceHead, confident_length_after_first
from dspark_jax.speculators_common.heads.markov_head import make_markov_head
from dspark_jax.speculators_common.numerics.linear import Linear
from dspark_jax.speculators_common.numerics.platform import Platform, default_platform

NO_THRESHOLD = -1.0  # a threshold that no confidence is below


class CompactDraft(DraftChain):
    """A `Draft` (see `architectures/protocols.py`) of the compact style, and its training forward.

    `init.py` makes a fresh one, `checkpoint.py` saves and loads it.
    """

    def __init__(
        self,
        config: DraftConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        tables: DraftTables | None = None,
        platform: Platform | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        self.platform = platform = platform or default_platform()
        rngs = rngs or nnx.Rngs(0)
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.tables = tables or DraftTables(embed_tokens="target", lm_head="target")
        hidden, target_hidden, epsilon = config.hidden_size, config.target_hidden_size, config.rms_norm_eps
        self.context_projection = Linear(
            config.num_taps * target_hidden, hidden, dtype=dtype, platform=platform, rngs=rngs
        )
        self.context_norm = RMSNorm(hidden, epsilon)
        self.token_projection = Linear(target_hidden, hidden, dtype=dtype, platform=platform, rngs=rngs)
        self.mask_rows = nnx.Param(0.02 * jax.random.normal(rngs.params(), (config.block_size - 1, hidden), dtype))
        self.slot_rows = nnx.Param(0.02 * jax.random.normal(rngs.params(), (config.block_size, hidden), dtype))
        self.layers = nnx.List(
            CompactLayer(config, layer, dtype=dtype, platform=platform, rngs=rngs)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(hidden, epsilon)
        self.output_projection = Linear(hidden, target_hidden, dtype=dtype, platform=platform, rngs=rngs)
        self.markov_head = make_markov_head(config, dtype=dtype, platform=platform, rngs=rngs)
        self.confidence_head = ConfidenceHead(config, platform=platform, rngs=rngs)
        self.draft_to_target = None

    @property
    def has_own_embed_tokens(self) -> bool:
        """Never: the anchor's row is the target's."""
        return False

    @property
    def has_own_lm_head(self) -> bool:
        """Never: the head is the target's, its soft-cap included."""
        return False

    def kv_params(self, page_size: int) -> KVParams:
        """Geometry of the context cache."""
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
        """Context features; every layer norms them once more."""
        return self.context_norm(self.context_projection.float32(taps))

    def materialize_kv(self, context: Float[Array, "T d"], batch: RaggedBatch, cache: KVCache) -> KVCache:
        """Store each layer's context K/V; the position only says where."""
        for index, layer in enumerate(self.layers):
            cache = cache.write(index, batch, *layer.context_keys_values(context))
        return cache

    def embed_block(self, anchor: Int32[Array, "B"], target: TargetTables | None = None) -> Float[Array, "B W d"]:
        """The anchor's raw row of the target's table, projected, and a learned row for each other slot; float32: the
        block's residual stream.
        """
        return self._block_input(required_target(target, "embed_tokens").embed_tokens(anchor))

    def forward_block(
        self, embeds: Float[Array, "B W d"], context: BlockContext, num_slots: int | None = None
    ) -> Float[Array, "B Ws d"]:
        """Final-normed hidden states of the first `num_slots` slots; the anchor sits at position `context.lengths`.

        All W slots always run. Only the last layer's queries are cut.
        """
        x, width = embeds, embeds.shape[1]
        for index, layer in enumerate(self.layers):
            last = index == len(self.layers) - 1
            with jax.named_scope(f"draft_layer{index}"):
                x = layer(x, context, (num_slots or width) if last else width)
        return self.norm(x)

    def compute_logits(
        self, hidden: Float[Array, "B Ws d"], target: TargetTables | None = None
    ) -> Float[Array, "B Ws V"]:
        """Base logits, float32: the target's head with its soft-cap and without its final norm."""
        return required_target(target, "lm_head").compute_logits(self.output_projection(hidden))

    def proposal_length(self, confidence: Float[Array, "B Ds"], threshold: Float[Array, "B"]) -> Int32[Array, "B"]:
        """Drafts to verify, at least one. A row's own `threshold` holds for all slots; 0 means those stored with the
        draft, if there are any.
        """
        stored = np.full((confidence.shape[1],), NO_THRESHOLD, np.float32)
        if self.config.thresholds is not None:
            stored = np.asarray(self.config.thresholds.values[: confidence.shape[1]], np.float32)
        own = threshold[:, None]
        return confident_length_after_first(confidence, jnp.where(own > 0, own, jnp.asarray(stored)[None, :]))

    def forward_train(
        self,
        taps: Float[Array, "A L mH"],
        context_mask: Bool[Array, "A L"] | None,
        anchor_embedding: Float[Array, "A H"],
        previous: Int32[Array, "A W"],
        target: TargetTables,
    ) -> tuple[Float[Array, "A W V"], Float[Array, "A W"]]:
        """Draft logits and confidence (a probability) of `A` anchors at once, every slot given its true previous token.

        `taps` are rows strictly before each anchor, `context_mask` marks the real ones (`None`: all are).
        `anchor_embedding` are raw rows of the target's table.
        """
        hidden = self.hidden_train(taps, context_mask, anchor_embedding)
        logits = self.teacher_forced_logits(self.compute_logits(hidden, target), previous, hidden=hidden)
        return logits, jax.nn.sigmoid(self.teacher_forced_confidence(hidden, previous))

    def hidden_train(
        self,
        taps: Float[Array, "A L mH"],
        context_mask: Bool[Array, "A L"] | None,
        anchor_embedding: Float[Array, "A H"],
    ) -> Float[Array, "A W d"]:
        """Final-normed hidden states of every slot; see `forward_train`."""
        anchors, length, _ = taps.shape
        # Row i of `length` rows that end right before the anchor: position i, with the anchor at `length`.
        positions = jnp.arange(length, dtype=jnp.int32)[None]
        if context_mask is not None:
            positions = jnp.where(context_mask, positions, PADDING_POSITION)
        context = DenseContext(
            keys_values=self.project_context_rows(taps),
            positions=positions,
            lengths=jnp.full((anchors,), length, jnp.int32),
            softmax=self.platform.softmax,
        )
        return self.forward_block(self._block_input(anchor_embedding), context)

    def project_context_rows(self, taps: Float[Array, "B L mH"]) -> ContextKV:
        """Per layer K and V of context rows, `[B, N, L, hd]`; without positions."""
        context = self.project_target_hidden(taps)
        pairs = [layer.context_keys_values(context) for layer in self.layers]
        return tuple((keys.swapaxes(1, 2), values.swapaxes(1, 2)) for keys, values in pairs)

    def forward_rows(
        self,
        context_kv: ContextKV,
        context_lengths: Int32[Array, "B"],
        anchors: Int32[Array, "B"],
        target: TargetTables,
        *,
        num_steps: int | None = None,
        thresholds: Sequence[float] | Literal["stored"] | None = "stored",
        min_confidence: float | None = None,
        sampler: Sampler | None = None,
    ) -> DraftRows:
        """One block per row from dense context lines, of which row b sees the first `context_lengths[b]` places.

        `num_steps` shortens the chain; the backbone always runs the trained width. `thresholds` end a row's proposal
        before the first slot whose confidence is lower, slot 0 excepted; slots beyond the list have `min_confidence`,
        or no threshold. By default those of the draft, if any. `sampler(logits [B, V], slot)` picks the tokens, argmax
        by default.
        """
        steps = self.config.block_size if num_steps is None else num_steps
        if not 1 <= steps <= self.config.block_size:
            raise RequestError(f"found {steps}, allowed 1..{self.config.block_size}", field="num_steps")
        if isinstance(thresholds, str):
            thresholds = None if self.config.thresholds is None else self.config.thresholds.values
        limits = effective_thresholds(thresholds, min_confidence, self.config.block_size)[:steps]
        context = dense_context(context_kv, context_lengths, self.platform.softmax)
        hidden = self.forward_block(self.embed_block(anchors, target), context, steps)
        base_logits = self.compute_logits(hidden, target)
        tokens = self.sample_draft_tokens(base_logits, anchors, sampler, hidden=hidden)
        logits = self.predict_confidence(hidden, anchors, tokens)
        assert logits is not None
        lengths = confident_length_after_first(logits, jnp.broadcast_to(jnp.asarray(limits)[None, :], logits.shape))
        return DraftRows(tokens, jax.nn.sigmoid(logits), lengths, base_logits)

    def _block_input(self, anchor_rows: Float[Array, "B H"]) -> Float[Array, "B W d"]:
        first = self.token_projection.float32(anchor_rows)[:, None]
        masked = jnp.broadcast_to(
            self.mask_rows[...].astype(jnp.float32)[None], (first.shape[0], *self.mask_rows.shape)
        )
        return jnp.concatenate([first, masked], axis=1) + self.slot_rows[...].astype(jnp.float32)[None]


def effective_thresholds(
    thresholds: Sequence[float] | None, min_confidence: float | None, block_size: int
) -> Float[np.ndarray, "W"]:
    """One threshold per slot, float32: the list, beyond its end `min_confidence`, else `NO_THRESHOLD`."""
    listed = list(thresholds or ())
    if len(listed) > block_size:
        raise RequestError(
            f"found {len(listed)} numbers, allowed at most {block_size}, one for each slot", field="thresholds"
        )
    rest = NO_THRESHOLD if min_confidence is None else min_confidence
    return np.asarray(listed + [rest] * (block_size - len(listed)), np.float32)
