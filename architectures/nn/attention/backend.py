"""What an attention backend is: it owns the layout of a page, and the operations that depend on it."""

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
"""The pages of one layer, as its backend arranges them. The first axis of every array counts the pages."""

LayerShapes = tuple[Array | jax.ShapeDtypeStruct, ...]
"""The same, or only their shapes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """One use of attention, as far as it decides whether a backend can serve it."""

    operation: Operation
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    page_size: int
    window: int | None
    causal: bool
    dtype: DTypeLike  # as the pages are stored


@dataclasses.dataclass(frozen=True)
class AttentionBackend(abc.ABC):
    """Attention over pages, for one platform. A backend is a value: two of one class and platform are equal.

    `paged_attention` serves targets: the pages hold the new rows already, and a token sees its row up to itself.
    `block_attention` serves drafts: a block sees context pages and its own keys, which are never written. Scores and
    softmax are float32.
    """

    name: ClassVar[str]
    platform: Platform

    @abc.abstractmethod
    def zeros(self, params: KVParams, num_pages: int) -> tuple[LayerPools, ...]:
        """Empty pages of every layer."""

    @abc.abstractmethod
    def page_size_of(self, pools: LayerShapes) -> int:
        """Positions of a page."""

    @abc.abstractmethod
    def num_heads_of(self, pools: LayerShapes) -> int:
        """Key heads of a layer."""

    def num_pages_of(self, pools: LayerShapes) -> int:
        """Pages of a layer."""
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
        """Store each token's keys and values in its slot of its page; a page that does not exist drops them."""

    @abc.abstractmethod
    def read(
        self, pools: LayerPools, page_table: Int32[Array, "B P"]
    ) -> tuple[Float[Array, "B K S hd"], Float[Array, "B K S hd"]]:
        """Keys and values of every row in order of position, whatever the layout; `S` = table width times page size."""

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
        """Causal attention of every token over its row's stored positions, its own included (`masks.causal_mask`)."""

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
        """Attention of the first `Wq` of `W` block slots, at positions `lengths + k`, over context and block
        (`masks.context_mask`, `masks.block_mask`).
        """

    def unsupported(self, case: AttentionCase) -> str | None:
        """Why this backend cannot serve `case`; `None` if it can."""
        return None
