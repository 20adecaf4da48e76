"""The compact draft: a small trainable network that uses the target's embedding and head.

The context K/V of a token do not depend on its position or on other tokens. In training as in decoding, the context of
a block is strictly before the anchor; in training the caller ensures this (`training_rows.py`). Axis letter `A`: the
anchors of a training batch.
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
from dspark_jax.speculators_common.numerics.initial_values import initial_values
from dspark_jax.speculators_common.numerics.linear import Linear
from dspark_jax.speculators_common.numerics.platform import Platform, default_platform

NO_THRESHOLD = -1.0  # no confidence is below this threshold


class CompactDraft(DraftChain):
    """A `Draft` (see `architectures/protocols.py`) of the compact style, with a forward pass for training.

    `init.py` makes a new one, `checkpoint.py` saves and loads it.
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
        self.mask_rows = nnx.Param(initial_values((config.block_size - 1, hidden), dtype, rngs))
        self.slot_rows = nnx.Param(initial_values((config.block_size, hidden), dtype, rngs))
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
        """Always false: the draft uses the target's embedding."""
        return False

    @property
    def has_own_lm_head(self) -> bool:
        """Always false: the draft uses the target's head, with its soft-cap."""
        return False

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
        """Context features `context_norm(context_projection(taps))`. Every layer applies a norm of its own to them."""
        return self.context_norm(self.context_projection.float32(taps))

    def materialize_kv(self, context: Float[Array, "T d"], batch: RaggedBatch, cache: KVCache) -> KVCache:
        """The cache with each layer's context K/V stored at the positions of `batch`. Inert tokens are not stored."""
        for index, layer in enumerate(self.layers):
            cache = cache.write(index, batch, *layer.context_keys_values(context))
        return cache

    def embed_block(self, anchor: Int32[Array, "B"], target: TargetTables | None = None) -> Float[Array, "B W d"]:
        """The block's residual stream, float32: the projected embedding row of the anchor, then learned rows.

        A learned row per slot is added to all of them. Raises `ValueError` if `target` is `None`.
        """
        return self._block_input(required_target(target, "embed_tokens").embed_tokens(anchor))

    def forward_block(
        self, embeds: Float[Array, "B W d"], context: BlockContext, num_slots: int | None = None
    ) -> Float[Array, "B Ws d"]:
        """Hidden states after the final norm, of the first `num_slots` slots (default: all).

        The anchor is at position `context.lengths`. All W slots run through every layer but the last. In the last layer
        only `num_slots` slots are queries.
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
        """Base logits, float32, by the target's head with its soft-cap and without its final norm.

        Raises `ValueError` if `target` is `None`.
        """
        return required_target(target, "lm_head").compute_logits(self.output_projection(hidden))

    def proposal_length(self, confidence: Float[Array, "B Ds"], threshold: Float[Array, "B"]) -> Int32[Array, "B"]:
        """The number of drafts to verify, at least one.

        The proposal ends before the first slot, other than slot 0, whose confidence is below its threshold.
        `confidence` are logits, `threshold` is a probability that holds for all slots of the row. At 0 the thresholds
        stored with the draft apply, if there are any.
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
        """Draft logits and confidences (probabilities) of `A` anchors, with the true token before every slot given.

        `taps` belong to `L` positions directly before each anchor. `context_mask` is false for padding (`None`: there
        is none). `anchor_embedding` are the anchors' rows of the target's embedding, without scaling.
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
        """Hidden states of all slots after the final norm. The arguments are those of `forward_train`."""
        anchors, length, _ = taps.shape
        # The context ends directly before the anchor. Masks use only relative positions, so the anchor is at `length`.
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
        """The context K/V of every layer, `[B, N, L, hd]`, from concatenated taps."""
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
        """Draft one block per row from dense context K/V, of which row b sees the first `context_lengths[b]` positions.

        `num_steps` is the number of drafts (default: the block size). The backbone runs all slots in any case. A
        proposal ends before the first slot, other than slot 0, whose confidence is below its threshold. `thresholds`
        has one probability per slot; `"stored"` takes those of the draft, if any. Slots beyond the list have the
        threshold `min_confidence`, or none. `sampler(logits, slot)` chooses the draft ids of one slot; `None` takes the
        argmax.

        Raises `RequestError` for `num_steps` outside 1..W, and for more thresholds than slots.
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
    """One threshold per slot, float32: those of the list, then `min_confidence`, or `NO_THRESHOLD` if it is `None`.

    Raises `RequestError` for more thresholds than slots.
    """
    listed = list(thresholds or ())
    if len(listed) > block_size:
        raise RequestError(
            f"found {len(listed)} numbers, allowed at most {block_size}, one for each slot", field="thresholds"
        )
    rest = NO_THRESHOLD if min_confidence is None else min_confidence
    return np.asarray(listed + [rest] * (block_size - len(listed)), np.float32)
