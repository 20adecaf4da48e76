"""Attention for TPUs: pages are read where they are, by a Pallas kernel."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from dspark_jax.architectures.nn.attention.backends.backend import AttentionBackend, LayerPools, LayerShapes
from dspark_jax.architectures.nn.attention.backends.partial import PartialAttention, dense_attention, merged
from dspark_jax.architectures.nn.attention.kv_params import KVParams
from dspark_jax.architectures.nn.attention.masks import VisibleRange, block_mask, causal_range, context_range
from dspark_jax.architectures.nn.attention.ragged_batch import RaggedBatch
from dspark_jax.speculators_common.formats.draft_config import LayerMask, WindowOrigin
from dspark_jax.speculators_common.numerics.rows import decode_rows, encode_rows


class PagedTpu(AttentionBackend):
    """One pool for keys and values, `[pages, page, 2 * K * hd]`: key of head 0, value of head 0, key of head 1, ...

    A position is one line, so that a token is stored by writing one line, and the keys of a head are columns, which the
    kernel can multiply as they are: with head sizes that are multiples of 128 nothing is moved. The heads of a device
    are neighbouring columns if heads are sharded.
    """

    name = "tpu-paged"
    reads_by_length = True

    def zeros(self, params: KVParams, num_pages: int) -> tuple[LayerPools, ...]:
        dtype = self.platform.row_dtype(params.dtype)
        return tuple(
            (jnp.zeros((num_pages, params.page_size, 2 * heads * head_dim), dtype),)
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
        lines = jnp.stack([keys, values], axis=2).reshape(keys.shape[0], -1)
        return (pool.at[page, slot].set(encode_rows(lines, pool.dtype), mode="drop"),)

    def read(
        self, pools: LayerPools, page_table: Int32[Array, "B P"], head_dim: int
    ) -> tuple[Float[Array, "B K S hd"], Float[Array, "B K S hd"]]:
        pages = decode_rows(jnp.take(pools[0], page_table, axis=0, mode="clip"))
        pairs = pages.reshape(page_table.shape[0], -1, pages.shape[-1] // (2 * head_dim), 2, head_dim)
        heads = pairs.transpose(3, 0, 2, 1, 4)
        return heads[0], heads[1]

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
        visible = causal_range(batch.to_rows(batch.positions), window)
        found = _attend_to_pages(pools, page_table, batch.to_rows(query), visible, scale)
        return batch.to_flat(found.values.astype(query.dtype))

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
        num_queries, num_slots = query.shape[1], block_keys.shape[1]
        context = _attend_to_pages(pools, page_table, query, context_range(lengths, num_queries, mask, origin), scale)
        keys, values = (part.astype(pools[0].dtype) for part in (block_keys, block_values))
        seen = block_mask(num_slots, mask, origin)[:num_queries]
        block = dense_attention(query, keys, values, seen, scale=scale)
        return merged([context, block]).astype(query.dtype)


def _attend_to_pages(
    pools: LayerPools,
    page_table: Int32[Array, "B P"],
    query: Float[Array, "B L N hd"],
    visible: VisibleRange,
    scale: float,
) -> PartialAttention:
    # Pallas takes 0.1 s to import, which other platforms need not pay.
    from dspark_jax.architectures.nn.attention.backends.tpu_kernel import context_attention

    return context_attention(pools[0], page_table, query, visible, scale=scale)
