"""The context of a draft block, behind one interface: pages of a cache, or keys and values at hand."""

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
"""Keys and values of every layer of a draft, row by row."""


@runtime_checkable
class BlockContext(Protocol):
    """What a draft block attends to besides itself; `KVCache` and `DenseContext` are such."""

    @property
    def lengths(self) -> Int32[Array, "B"]:
        """Position of each row's anchor; the context lies before it."""
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
        """Attention of the first `Wq` of `W` block slots, at positions `lengths + k`, over context and block."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseContext:
    """Context keys and values without pages, as in training and for callers who keep lines of their own.

    `positions` are absolute, in any order; a negative one marks a place that holds nothing.
    """

    keys_values: ContextKV
    positions: Int32[Array, "#B L"]
    lengths: Int32[Array, "B"]
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
