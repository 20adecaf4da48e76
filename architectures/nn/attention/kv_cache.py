"""Paged key/value cache: per layer one pool of pages for the keys and one for the values.

Position `s` of a row lives in slot `s % page_size` of page `page_table[row, s // page_size]`, so a cache row is found
by absolute position and stale content beyond a row's position is never visible. Several rows may name the same page
(shared prefixes); target and draft use the same page ids in pools of their own.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, Shaped

from dspark_jax.architectures.nn.attention.ragged_batch import RaggedBatch
from dspark_jax.speculators_common.numerics.storage import decode_rows, encode_rows, row_storage_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVParams:
    """Geometry of one model's cache. `num_layers` counts the layers that store keys and values; a tuple has one entry
    for each of them.
    """

    num_layers: int
    num_key_value_heads: int | tuple[int, ...]  # K
    head_dim: int | tuple[int, ...]  # hd
    page_size: int = 64
    dtype: DTypeLike = jnp.bfloat16

    @property
    def layer_shapes(self) -> tuple[tuple[int, int], ...]:
        """(K, hd) of every layer."""
        return tuple(zip(self._per_layer(self.num_key_value_heads), self._per_layer(self.head_dim), strict=True))

    def bytes_per_page(self) -> int:
        """Bytes that one page id costs over all layers, keys and values."""
        per_position = sum(heads * head_dim for heads, head_dim in self.layer_shapes)
        return 2 * per_position * self.page_size * jnp.dtype(self.dtype).itemsize

    def _per_layer(self, size: int | tuple[int, ...]) -> tuple[int, ...]:
        return size if isinstance(size, tuple) else (size,) * self.num_layers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVPages:
    """The pools of one model, one pair per storing layer. Head-major inside a page: attention reads whole heads."""

    keys: tuple[Shaped[Array, "pages _K page _hd"], ...]
    values: tuple[Shaped[Array, "pages _K page _hd"], ...]

    @property
    def num_pages(self) -> int:
        """Pages of every pool."""
        return self.keys[0].shape[0]

    @property
    def page_size(self) -> int:
        """Positions of a page."""
        return self.keys[0].shape[2]

    @classmethod
    def zeros(cls, params: KVParams, num_pages: int) -> KVPages:
        """Empty pools of `num_pages` pages."""
        shapes = [(num_pages, heads, params.page_size, head_dim) for heads, head_dim in params.layer_shapes]
        storage = row_storage_dtype(params.dtype)
        return cls(
            keys=tuple(jnp.zeros(shape, storage) for shape in shapes),
            values=tuple(jnp.zeros(shape, storage) for shape in shapes),
        )


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
        pool = self.pages.keys[layer]
        num_pages, _, page_size, _ = pool.shape
        page_index = jnp.maximum(batch.positions, 0) // page_size
        page = self.page_table[batch.row_of_token, jnp.minimum(page_index, self.page_table.shape[1] - 1)]
        stored = (batch.positions >= 0) & (page_index < self.page_table.shape[1])
        page = jnp.where(stored, page, num_pages)
        slot = jnp.maximum(batch.positions, 0) % page_size
        pages = KVPages(
            keys=_replace(self.pages.keys, layer, _scatter(pool, page, slot, keys)),
            values=_replace(self.pages.values, layer, _scatter(self.pages.values[layer], page, slot, values)),
        )
        return dataclasses.replace(self, pages=pages)

    def read(self, layer: int) -> tuple[Float[Array, "B K S hd"], Float[Array, "B K S hd"]]:
        """Keys and values of every row, gathered in order of position; `S` = table width times page size."""
        return self._gather(self.pages.keys[layer]), self._gather(self.pages.values[layer])

    def _gather(self, pool: Shaped[Array, "pages K page hd"]) -> Float[Array, "B K S hd"]:
        rows, width = self.page_table.shape
        _, heads, page_size, head_dim = pool.shape
        gathered = jnp.take(pool, self.page_table, axis=0, mode="clip")
        return decode_rows(gathered.transpose(0, 2, 1, 3, 4).reshape(rows, heads, width * page_size, head_dim))


def _scatter(
    pool: Shaped[Array, "pages K page hd"],
    page: Int32[Array, "T"],
    slot: Int32[Array, "T"],
    rows: Float[Array, "T K hd"],
) -> Shaped[Array, "pages K page hd"]:
    finite = jnp.where(jnp.isfinite(rows), rows, jnp.zeros_like(rows))
    return pool.at[page, :, slot].set(encode_rows(finite, pool.dtype), mode="drop")


def _replace(
    pools: tuple[Shaped[Array, "..."], ...], layer: int, pool: Shaped[Array, "..."]
) -> tuple[Shaped[Array, "..."], ...]:
    return (*pools[:layer], pool, *pools[layer + 1 :])
