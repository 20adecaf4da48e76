"""The interface of an attention backend, which owns the layout of a page and the operations that depend on it."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar, Literal

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, Shaped

from dspark_jax.architectures.nn.attention.kv_params import KVParams
from dspark_jax.architectures.nn.attention.ragged_batch import RaggedBatch
from dspark_jax.speculators_common.formats.draft_config import LayerMask, WindowOrigin
from dspark_jax.speculators_common.numerics.platform import Platform

Operation = Literal["paged_attention", "block_attention"]

LayerPools = tuple[Shaped[Array, "pages ..."], ...]
"""The pages of one layer in the layout of the backend. The first axis of every array is the page id."""

LayerShapes = tuple[Array | jax.ShapeDtypeStruct, ...]
"""`LayerPools`, or only the shapes of its arrays."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """One use of attention: the static facts by which a backend says whether it supports the use."""

    operation: Operation
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    page_size: int
    window: int | None
    causal: bool
    dtype: DTypeLike  # storage dtype of the pages


@dataclasses.dataclass(frozen=True)
class AttentionBackend(abc.ABC):
    """Attention over pages, for one platform. Two backends of one class and platform are equal.

    `paged_attention` is for targets: the pages already hold the keys and values of the batch, and a token sees the
    positions of its row up to its own. `block_attention` is for drafts: a block sees the context in the pages and its
    own keys, which are never written. Scores and softmax are float32.
    """

    name: ClassVar[str]
    # Whether the cost of a call follows the stored lengths. If false, it follows the width of the page table.
    reads_by_length: ClassVar[bool] = False
    platform: Platform

    @abc.abstractmethod
    def zeros(self, params: KVParams, num_pages: int) -> tuple[LayerPools, ...]:
        """Zeroed pages of every layer."""

    @abc.abstractmethod
    def page_size_of(self, pools: LayerShapes) -> int:
        """Number of positions of a page."""

    def num_pages_of(self, pools: LayerShapes) -> int:
        """Number of pages of a layer."""
        return pools[0].shape[0]

    @abc.abstractmethod
    def write(
        self,
        pools: LayerPools,
        page: Int32[Array, "T"],
        slot: Int32[Array, "T"],
        keys: Float[Array, "T K hd"],
        values: Float[Array, "T K hd"],
    ) -> LayerPools:
        """The pools with each token's keys and values stored at `slot` of `page`.

        A token whose page id is not below the number of pages is not stored.
        """

    @abc.abstractmethod
    def read(
        self, pools: LayerPools, page_table: Int32[Array, "B P"], head_dim: int
    ) -> tuple[Float[Array, "B K S hd"], Float[Array, "B K S hd"]]:
        """Keys and values of every row in order of position. `S` is the page table's width times the page size."""

    @abc.abstractmethod
    def paged_attention(
        self,
        pools: LayerPools,
        page_table: Int32[Array, "B P"],
        query: Float[Array, "T N hd"],
        batch: RaggedBatch,
        *,
        scale: float,
        window: int | None,
    ) -> Float[Array, "T N hd"]:
        """Causal attention of every token over the stored positions of its row, its own included.

        The visible positions are those of `masks.causal_mask`. `scale` multiplies the scores, `window` is in positions.
        """

    @abc.abstractmethod
    def block_attention(
        self,
        pools: LayerPools,
        page_table: Int32[Array, "B P"],
        lengths: Int32[Array, "B"],
        query: Float[Array, "B Wq N hd"],
        block_keys: Float[Array, "B W K hd"],
        block_values: Float[Array, "B W K hd"],
        *,
        mask: LayerMask,
        origin: WindowOrigin,
        scale: float,
    ) -> Float[Array, "B Wq N hd"]:
        """Attention of the first `Wq` of `W` block slots over the context and the block.

        Slot k is at position `lengths + k`. The visible context is that of `masks.context_mask`, the visible slots are
        those of `masks.block_mask`. `scale` multiplies the scores.
        """

    def unsupported(self, case: AttentionCase) -> str | None:
        """The reason why this backend does not support `case`; `None` if it does."""
        return None
