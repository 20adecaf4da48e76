"""The drafts that DeepSpec releases: the block draft, and the row-batched methods of its MLX ports.

The row-batched methods keep no state: the caller passes dense context K/V. They use the same layers as the paged
methods and compute the same.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from dspark_jax.architectures.drafting.block_draft import BlockDraft
from dspark_jax.architectures.drafting.dense_rows import DraftRows, dense_context
from dspark_jax.architectures.dspark_deepspec.gemma4_layer import Gemma4BlockLayer
from dspark_jax.architectures.nn.attention.block_context import ContextKV
from dspark_jax.architectures.nn.rotary import rotary_angles

__all__ = ["ContextKV", "DeepSpecDraft", "DraftRows", "Gemma4DSparkDraft", "Qwen3DSparkDraft"]


class DeepSpecDraft(BlockDraft):
    """`BlockDraft` with the row-batched methods `project_context...`, `draft_block` and `draft_rows`."""

    def project_context(self, taps: Float[Array, "B L mH"]) -> Float[Array, "B L d"]:
        """Context features of concatenated taps; see `project_target_hidden`."""
        return self.project_target_hidden(taps)

    def project_context_kv(self, context: Float[Array, "1 L d"], positions: Int32[Array, "L"]) -> ContextKV:
        """The context K/V of every layer, for one row at the absolute `positions`."""
        return self._context_kv(context, positions[None, :])

    def project_context_kv_rows(self, context: Float[Array, "B L d"], first_position: Int32[Array, "#B"]) -> ContextKV:
        """The context K/V of every layer for rows that start at `first_position`, one for all rows or one for each."""
        rows, length, _ = context.shape
        first = jnp.broadcast_to(first_position, (rows,))
        return self._context_kv(context, first[:, None] + jnp.arange(length, dtype=jnp.int32)[None, :])

    def draft_block(
        self, context_kv: ContextKV, anchor: Int32[Array, ""], position: Int32[Array, ""], threshold: float = 0.0
    ) -> DraftRows:
        """Draft one block of one row greedily. `position` is the anchor's, and so the number of context positions."""
        return self.draft_rows(context_kv, anchor[None], position[None], threshold)

    def draft_rows(
        self, context_kv: ContextKV, anchors: Int32[Array, "B"], positions: Int32[Array, "#B"], threshold: float = 0.0
    ) -> DraftRows:
        """Draft one block per row greedily.

        `positions` are those of the anchors. Row b sees its first `positions[b]` context positions, so rows of
        different lengths may be padded. The proposal ends before the first slot whose confidence is below `threshold`,
        a probability; 0 keeps all drafts.
        """
        rows = anchors.shape[0]
        context = dense_context(context_kv, jnp.broadcast_to(positions, (rows,)), self.platform.softmax)
        hidden = self.forward_block(self.embed_block(anchors), context)
        base_logits = self.compute_logits(hidden)
        tokens = self.sample_draft_tokens(base_logits, anchors, hidden=hidden)
        logits = self.predict_confidence(hidden, anchors, tokens)
        if logits is None:
            full = jnp.full((rows,), tokens.shape[1], jnp.int32)
            return DraftRows(tokens, jnp.ones(tokens.shape, jnp.float32), full, base_logits)
        lengths = self.proposal_length(logits, jnp.full((rows,), threshold, jnp.float32))
        return DraftRows(tokens, 1 / (1 + jnp.exp(-logits)), lengths, base_logits)

    def _context_kv(self, context: Float[Array, "B L d"], positions: Int32[Array, "B L"]) -> ContextKV:
        angles = rotary_angles(positions, self.config.rope)
        pairs = [layer.attention.keys_values(context, angles) for layer in self.layers]
        return tuple((keys.swapaxes(1, 2), values.swapaxes(1, 2)) for keys, values in pairs)


class Qwen3DSparkDraft(DeepSpecDraft):
    """DeepSpec's draft with Qwen3 layers."""


class Gemma4DSparkDraft(DeepSpecDraft):
    """DeepSpec's draft with Gemma 4 layers, scaled embedding rows and soft-capped base logits."""

    layer_type = Gemma4BlockLayer
    style = "gemma4"
