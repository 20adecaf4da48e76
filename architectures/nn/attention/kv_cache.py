"""Paged key/value cache.

Position `s` of a row lives in slot `s % page_size` of page `page_table[row, s // page_size]`, so a cache row is found
by absolute position and stale content beyond a row's position is never visible. Several rows may name the same page
(shared prefixes); target and draft use the same page ids in pools of their own. How a page is laid out is the attention
backend's business.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from dspark_jax.architectures.nn.attention.backend import AttentionBackend, AttentionCase, LayerPools, Operation
from dspark_jax.architectures.nn.attention.backends import attention_backend
from dspark_jax.architectures.nn.attention.kv_params import KVParams
from dspark_jax.architectures.nn.attention.ragged_batch import RaggedBatch
from dspark_jax.speculators_common.formats.draft_config import LayerMask, WindowOrigin
from dspark_jax.speculators_common.numerics.platform import Platform


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVPages:
    """The pages of one model, layer by layer (those that store keys and values). The first axis of every array counts
    the pages.
    """

    layers: tuple[LayerPools, ...]
    backend: AttentionBackend = dataclasses.field(metadata={"static": True})

    @classmethod
    def zeros(cls, params: KVParams, num_pages: int) -> KVPages:
        """Empty pools of `num_pages` pages, laid out for `params.platform`."""
        backend = attention_backend(params.platform)
        return cls(layers=backend.zeros(params, num_pages), backend=backend)

    @property
    def platform(self) -> Platform:
        """The platform that the pages are laid out for."""
        return self.backend.platform

    @property
    def page_size(self) -> int:
        """Positions of a page."""
        return self.backend.page_size_of(self.layers[0])

    @property
    def num_pages(self) -> int:
        """Pages of every layer; as a page id it means unassigned."""
        return self.backend.num_pages_of(self.layers[0])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCache:
    """What a forward pass sees: the pools, which pages each row owns, and how many positions of each row are stored.

    A table entry equal to the number of pages is unassigned: writes to it are dropped.
    """

    pages: KVPages
    page_table: Int32[Array, "B P"]
    lengths: Int32[Array, "B"]

    def write(
        self, layer: int, batch: RaggedBatch, keys: Float[Array, "T K hd"], values: Float[Array, "T K hd"]
    ) -> KVCache:
        """Store one layer's keys and values at `batch.positions`; inert tokens and unassigned pages store nothing.

        A value that is not finite is stored as 0: masking gives a stale row weight 0, and 0 times NaN would still reach
        the row that owns the page next.
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
        """Keys and values of every row, gathered in order of position; `S` = table width times page size."""
        return self.pages.backend.read(self.pages.layers[layer], self.page_table)

    def paged_attention(
        self,
        layer: int,
        query: Float[Array, "T N hd"],
        batch: RaggedBatch,
        *,
        scale: float,
        window: int | None = None,
    ) -> Float[Array, "T N hd"]:
        """Causal attention of every token over its row's cached positions, its own included."""
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
        """Attention of block slots at positions `lengths + k` over [context ; block] (paper eq. for the draft layer).

        The first `Wq <= W` slots ask; all `W` slots are keys. The context is strictly before the anchor.
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
        """Raise `NotImplementedError` with the reason unless the backend can serve this use."""
        backend, pools = self.pages.backend, self.pages.layers[layer]
        case = AttentionCase(
            operation=operation,
            num_heads=query.shape[-2],
            num_key_value_heads=backend.num_heads_of(pools),
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
