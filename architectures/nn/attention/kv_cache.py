"""The paged key/value cache.

Position `s` of a row is stored in slot `s % page_size` of page `page_table[row, s // page_size]`. Masks use absolute
positions, so old content beyond a row's position is never visible. Several rows may share a page (common prefixes).
Target and draft use the same page ids, each in its own pools. The attention backend owns the layout of a page.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from dspark_jax.architectures.nn.attention.backends.backend import (
    AttentionBackend,
    AttentionCase,
    LayerPools,
    Operation,
)
from dspark_jax.architectures.nn.attention.backends.registry import attention_backend
from dspark_jax.architectures.nn.attention.kv_params import KVParams
from dspark_jax.architectures.nn.attention.ragged_batch import RaggedBatch
from dspark_jax.speculators_common.formats.draft_config import LayerMask, WindowOrigin
from dspark_jax.speculators_common.numerics.platform import Platform


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVPages:
    """The pages of one model: one entry for each layer that stores keys and values."""

    layers: tuple[LayerPools, ...]
    layer_shapes: tuple[tuple[int, int], ...] = dataclasses.field(metadata={"static": True})  # (K, hd) of every layer
    backend: AttentionBackend = dataclasses.field(metadata={"static": True})

    @classmethod
    def zeros(cls, params: KVParams, num_pages: int) -> KVPages:
        """Zeroed pools of `num_pages` pages in the layout of `params.platform`.

        Raises `NotImplementedError` if the platform's attention backend does not exist.
        """
        backend = attention_backend(params.platform)
        return cls(layers=backend.zeros(params, num_pages), layer_shapes=params.layer_shapes, backend=backend)

    @property
    def platform(self) -> Platform:
        """The platform of the page layout."""
        return self.backend.platform

    @property
    def page_size(self) -> int:
        """Number of positions of a page."""
        return self.backend.page_size_of(self.layers[0])

    @property
    def num_pages(self) -> int:
        """Number of pages of every layer. As a page id this number means "unassigned"."""
        return self.backend.num_pages_of(self.layers[0])

    def read(
        self, layer: int, page_table: Int32[Array, "B P"]
    ) -> tuple[Float[Array, "B K S hd"], Float[Array, "B K S hd"]]:
        """Keys and values of every row in order of position. `S` is the page table's width times the page size."""
        return self.backend.read(self.layers[layer], page_table, self.layer_shapes[layer][1])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCache:
    """The cache as a forward pass sees it: the pages, and for every row its page ids and its stored length."""

    pages: KVPages
    page_table: Int32[Array, "B P"]  # page ids; an entry equal to the number of pages is unassigned
    lengths: Int32[Array, "B"]  # number of stored positions

    def write(
        self, layer: int, batch: RaggedBatch, keys: Float[Array, "T K hd"], values: Float[Array, "T K hd"]
    ) -> KVCache:
        """The cache with one layer's keys and values stored at `batch.positions`.

        Inert tokens, and tokens of unassigned pages, are not stored. A value that is not finite is stored as 0. Masked
        keys get weight 0, and 0 times NaN is NaN, so a stored NaN would reach the next row that uses the page.
        """
        page_size, layers = self.pages.page_size, self.pages.layers
        page_index = jnp.maximum(batch.positions, 0) // page_size
        page = self.page_table[batch.row_of_token, jnp.minimum(page_index, self.page_table.shape[1] - 1)]
        stored = (batch.positions >= 0) & (page_index < self.page_table.shape[1])
        page = jnp.where(stored, page, self.pages.num_pages)
        slot = jnp.maximum(batch.positions, 0) % page_size
        written = self.pages.backend.write(layers[layer], page, slot, _finite(keys), _finite(values))
        pages = dataclasses.replace(self.pages, layers=(*layers[:layer], written, *layers[layer + 1 :]))
        return dataclasses.replace(self, pages=pages)

    def read(self, layer: int) -> tuple[Float[Array, "B K S hd"], Float[Array, "B K S hd"]]:
        """Keys and values of every row in order of position. `S` is the page table's width times the page size."""
        return self.pages.read(layer, self.page_table)

    def paged_attention(
        self,
        layer: int,
        query: Float[Array, "T N hd"],
        batch: RaggedBatch,
        *,
        scale: float,
        window: int | None = None,
    ) -> Float[Array, "T N hd"]:
        """Causal attention of every token over the cached positions of its row, its own included.

        `scale` multiplies the scores, `window` is in positions. Raises `NotImplementedError` if the backend does not
        support this use.
        """
        self._require("paged_attention", layer, query, window, causal=True)
        return self.pages.backend.paged_attention(
            self.pages.layers[layer], self.page_table, query, batch, scale=scale, window=window
        )

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
        """Attention of the first `Wq` of `W` block slots over the keys `[context; block]`.

        Slot k is at position `lengths + k`. All `W` slots are keys. The context is strictly before the anchor. `scale`
        multiplies the scores. Raises `NotImplementedError` if the backend does not support this use.
        """
        self._require("block_attention", layer, query, mask.window, causal=mask.causal)
        return self.pages.backend.block_attention(
            self.pages.layers[layer],
            self.page_table,
            self.lengths,
            query,
            block_keys,
            block_values,
            mask=mask,
            origin=origin,
            scale=scale,
        )

    def _require(
        self, operation: Operation, layer: int, query: Float[Array, "*axes N hd"], window: int | None, *, causal: bool
    ) -> None:
        """Raise `NotImplementedError` with the reason if the backend does not support this use."""
        backend, pools = self.pages.backend, self.pages.layers[layer]
        case = AttentionCase(
            operation=operation,
            num_heads=query.shape[-2],
            num_key_value_heads=self.pages.layer_shapes[layer][0],
            head_dim=query.shape[-1],
            page_size=backend.page_size_of(pools),
            window=window,
            causal=causal,
            dtype=pools[0].dtype,
        )
        reason = backend.unsupported(case)
        if reason is not None:
            raise NotImplementedError(f"{operation} by the attention backend {backend.name}: {reason}")


def _finite(rows: Float[Array, "T K hd"]) -> Float[Array, "T K hd"]:
    return jnp.where(jnp.isfinite(rows), rows, jnp.zeros_like(rows))
