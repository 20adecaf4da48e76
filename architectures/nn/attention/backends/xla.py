"""Attention over gathered pages in plain XLA, for two layouts of a page. Every platform can run it."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from dspark_jax.architectures.nn.attention.backends.backend import AttentionBackend, LayerPools, LayerShapes
from dspark_jax.architectures.nn.attention.key_sets import KeySet, attend, block_key_set
from dspark_jax.architectures.nn.attention.kv_params import KVParams
from dspark_jax.architectures.nn.attention.masks import causal_mask, context_mask
from dspark_jax.architectures.nn.attention.ragged_batch import RaggedBatch
from dspark_jax.speculators_common.formats.draft_config import LayerMask, WindowOrigin
from dspark_jax.speculators_common.numerics.rows import decode_rows, encode_rows


@dataclasses.dataclass(frozen=True)
class XlaAttention(AttentionBackend):
    """The part that both layouts share: it gathers the pages of every row and attends to them as a `KeySet`."""

    head_major: ClassVar[bool]

    @abc.abstractmethod
    def gathered(
        self, pools: LayerPools, page_table: Int32[Array, "B P"]
    ) -> tuple[Float[Array, "B _ _ hd"], Float[Array, "B _ _ hd"]]:
        """Keys and values of every row in order of position, with the axes of `KeySet`."""

    def read(
        self, pools: LayerPools, page_table: Int32[Array, "B P"], head_dim: int
    ) -> tuple[Float[Array, "B K S hd"], Float[Array, "B K S hd"]]:
        keys, values = self.gathered(pools, page_table)
        return (keys, values) if self.head_major else (keys.swapaxes(1, 2), values.swapaxes(1, 2))

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
        keys, values = self.gathered(pools, page_table)
        num_positions = page_table.shape[1] * self.page_size_of(pools)
        visible = causal_mask(batch.to_rows(batch.positions), num_positions, window)
        stored = KeySet(keys, values, visible, self.head_major)
        return batch.to_flat(attend(batch.to_rows(query), [stored], scale=scale, softmax=self.platform.softmax))

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
        keys, values = self.gathered(pools, page_table)
        positions = jnp.arange(page_table.shape[1] * self.page_size_of(pools), dtype=jnp.int32)[None]
        context = KeySet(keys, values, context_mask(lengths, query.shape[1], positions, mask, origin), self.head_major)
        own = block_key_set(block_keys, block_values, query.shape[1], mask, origin, like=context)
        return attend(query, [context, own], scale=scale, softmax=self.platform.softmax)


class XlaHeadMajor(XlaAttention):
    """One pool for keys and one for values, both `[pages, K, page, hd]`.

    The positions of a head are contiguous in memory, which is the fastest order for a CPU to read.
    """

    name = "xla-head-major"
    head_major = True

    def zeros(self, params: KVParams, num_pages: int) -> tuple[LayerPools, ...]:
        dtype = self.platform.row_dtype(params.dtype)
        shapes = [(num_pages, heads, params.page_size, head_dim) for heads, head_dim in params.layer_shapes]
        return tuple((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for shape in shapes)

    def page_size_of(self, pools: LayerShapes) -> int:
        return pools[0].shape[2]

    def write(
        self,
        pools: LayerPools,
        page: Int32[Array, "T"],
        slot: Int32[Array, "T"],
        keys: Float[Array, "T K hd"],
        values: Float[Array, "T K hd"],
    ) -> LayerPools:
        key_pool, value_pool = pools
        return (
            key_pool.at[page, :, slot].set(encode_rows(keys, key_pool.dtype), mode="drop"),
            value_pool.at[page, :, slot].set(encode_rows(values, value_pool.dtype), mode="drop"),
        )

    def gathered(
        self, pools: LayerPools, page_table: Int32[Array, "B P"]
    ) -> tuple[Float[Array, "B K S hd"], Float[Array, "B K S hd"]]:
        return _heads_together(pools[0], page_table), _heads_together(pools[1], page_table)


class XlaSlotMajor(XlaAttention):
    """One pool for keys and values, `[pages, page, 2K, hd]`. They alternate by head: key 0, value 0, key 1, ...

    XLA gives pools this order around a loop on accelerators, whatever order the program states.
    """

    name = "xla-slot-major"
    head_major = False

    def zeros(self, params: KVParams, num_pages: int) -> tuple[LayerPools, ...]:
        dtype = self.platform.row_dtype(params.dtype)
        return tuple(
            (jnp.zeros((num_pages, params.page_size, 2 * heads, head_dim), dtype),)
            for heads, head_dim in params.layer_shapes
        )

    def page_size_of(self, pools: LayerShapes) -> int:
        return pools[0].shape[1]

    def write(
        self,
        pools: LayerPools,
        page: Int32[Array, "T"],
        slot: Int32[Array, "T"],
        keys: Float[Array, "T K hd"],
        values: Float[Array, "T K hd"],
    ) -> LayerPools:
        (pool,) = pools
        tokens, heads, head_dim = keys.shape
        rows = jnp.stack([keys, values], axis=2).reshape(tokens, 2 * heads, head_dim)
        return (pool.at[page, slot].set(encode_rows(rows, pool.dtype), mode="drop"),)

    def gathered(
        self, pools: LayerPools, page_table: Int32[Array, "B P"]
    ) -> tuple[Float[Array, "B S K hd"], Float[Array, "B S K hd"]]:
        (pool,) = pools
        _, page_size, heads, head_dim = pool.shape
        pages = decode_rows(jnp.take(pool, page_table, axis=0, mode="clip"))
        pairs = pages.reshape(page_table.shape[0], page_table.shape[1] * page_size, heads // 2, 2, head_dim)
        return pairs[..., 0, :], pairs[..., 1, :]


def _heads_together(
    pool: Shaped[Array, "pages K page hd"], page_table: Int32[Array, "B P"]
) -> Float[Array, "B K S hd"]:
    rows, width = page_table.shape
    _, heads, page_size, head_dim = pool.shape
    pages = jnp.take(pool, page_table, axis=0, mode="clip")
    return decode_rows(pages.transpose(0, 2, 1, 3, 4).reshape(rows, heads, width * page_size, head_dim))
