"""The context that a draft block attends to: one interface for the pages of a cache and for dense arrays."""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float, Int32

from dspark_jax.architectures.nn.attention.key_sets import KeySet, attend, block_key_set
from dspark_jax.architectures.nn.attention.masks import context_mask
from dspark_jax.speculators_common.formats.draft_config import LayerMask, WindowOrigin
from dspark_jax.speculators_common.numerics.platform import SoftmaxForm

ContextKV = tuple[tuple[Float[Array, "B K L hd"], Float[Array, "B K L hd"]], ...]
"""Keys and values of every draft layer; `L` context positions per row."""


@runtime_checkable
class BlockContext(Protocol):
    """The context of a draft block. `KVCache` and `DenseContext` implement it."""

    @property
    def lengths(self) -> Int32[Array, "B"]:
        """The position of each row's anchor. All context positions are before it."""
        ...

    def block_attention(
        self,
        layer: int,
        query: Float[Array, "B Wq N hd"],
        block_keys: Float[Array, "B W K hd"],
        block_values: Float[Array, "B W K hd"],
        *,
        mask: LayerMask,
        origin: WindowOrigin,
        scale: float,
    ) -> Float[Array, "B Wq N hd"]:
        """Attention of the first `Wq` of `W` block slots over the context and the block.

        Slot k is at position `lengths + k`. `scale` multiplies the scores.
        """
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseContext:
    """Context keys and values in dense arrays instead of pages: for training, and for callers that keep their own."""

    keys_values: ContextKV
    positions: Int32[Array, "#B L"]  # absolute, in any order; negative: there is no key
    lengths: Int32[Array, "B"]  # positions of the anchors
    softmax: SoftmaxForm = dataclasses.field(metadata={"static": True})

    def block_attention(
        self,
        layer: int,
        query: Float[Array, "B Wq N hd"],
        block_keys: Float[Array, "B W K hd"],
        block_values: Float[Array, "B W K hd"],
        *,
        mask: LayerMask,
        origin: WindowOrigin,
        scale: float,
    ) -> Float[Array, "B Wq N hd"]:
        """See `BlockContext`."""
        keys, values = self.keys_values[layer]
        visible = context_mask(self.lengths, query.shape[1], self.positions, mask, origin)
        context = KeySet(keys, values, visible, head_major=True)
        own = block_key_set(block_keys, block_values, query.shape[1], mask, origin, like=context)
        return attend(query, [context, own], scale=scale, softmax=self.softmax)
