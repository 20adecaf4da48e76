"""Attention over pages against a loop over rows, heads and keys."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.architectures.nn.attention.kv_cache import KVCache, KVPages, KVParams
from dspark_jax.architectures.nn.attention.masks import block_mask, context_mask
from dspark_jax.architectures.nn.attention.ragged_batch import PADDING_POSITION, RaggedBatch
from dspark_jax.architectures.nn.attention.reference import block_attention, paged_attention
from dspark_jax.speculators_common.formats.draft_config import LayerMask, WindowOrigin

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, WIDTH, SCALE = 4, 2, 8, 4, 3, 0.3
LENGTHS = (9, 0, 5)
ROWS = len(LENGTHS)
# Rows own scattered pages; 12 is one beyond the pool: unassigned.
TABLE = np.asarray([[7, 2, 11], [12, 12, 12], [0, 5, 12]], np.int32)

pytestmark = pytest.mark.usefixtures("quick_compilation")


def _filled() -> tuple[KVCache, list[np.ndarray], list[np.ndarray]]:
    """A cache with random rows at positions below LENGTHS and, per row, the keys and values that were written, `[K, P,
    hd]`.
    """
    rng = np.random.default_rng(0)
    params = KVParams(
        num_layers=1, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, page_size=PAGE_SIZE, dtype=jnp.float32
    )
    cache = KVCache(
        pages=KVPages.zeros(params, 12), page_table=jnp.asarray(TABLE), lengths=jnp.asarray(LENGTHS, jnp.int32)
    )
    longest = max(LENGTHS)
    positions = np.where(
        np.arange(longest) < np.asarray(LENGTHS)[:, None], np.arange(longest), PADDING_POSITION
    ).astype(np.int32)
    batch = RaggedBatch.rectangle(jnp.zeros(positions.shape, jnp.int32), jnp.asarray(positions))
    keys, values = (rng.normal(size=(ROWS * longest, KV_HEADS, HEAD_DIM)).astype(np.float32) for _ in range(2))
    cache = cache.write(0, batch, jnp.asarray(keys), jnp.asarray(values))
    by_row = [
        [
            part.reshape(ROWS, longest, KV_HEADS, HEAD_DIM)[row, :length].swapaxes(0, 1)
            for row, length in enumerate(LENGTHS)
        ]
        for part in (keys, values)
    ]
    return cache, by_row[0], by_row[1]


def _attend(query: np.ndarray, keys: np.ndarray, values: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """One query `[N, hd]` over keys `[K, S, hd]`."""
    out = np.zeros_like(query)
    for head in range(HEADS):
        shared = head // (HEADS // KV_HEADS)
        scores = keys[shared][visible] @ query[head] * SCALE
        weights = np.exp(scores - scores.max())
        out[head] = weights @ values[shared][visible] / weights.sum()
    return out


@pytest.mark.parametrize("origin", ["anchor", "query"])
@pytest.mark.parametrize(
    "mask", [LayerMask(), LayerMask(causal=True), LayerMask(window=4), LayerMask(window=2, causal=True)], ids=str
)
def test_block_slots_attend_to_their_context_and_their_block(mask: LayerMask, origin: WindowOrigin) -> None:
    cache, keys, values = _filled()
    rng = np.random.default_rng(1)
    query = rng.normal(size=(ROWS, WIDTH, HEADS, HEAD_DIM)).astype(np.float32)
    block_keys, block_values = (rng.normal(size=(ROWS, WIDTH, KV_HEADS, HEAD_DIM)).astype(np.float32) for _ in range(2))
    asked, own_keys, own_values = (jnp.asarray(part) for part in (query, block_keys, block_values))
    found = np.asarray(block_attention(asked, own_keys, own_values, cache, 0, mask=mask, origin=origin, scale=SCALE))
    in_context = np.asarray(context_mask(cache.lengths, WIDTH, max(LENGTHS), mask, origin))
    in_block = np.asarray(block_mask(WIDTH, mask, origin))
    for row, length in enumerate(LENGTHS):
        all_keys = np.concatenate([keys[row], block_keys[row].swapaxes(0, 1)], axis=1)
        all_values = np.concatenate([values[row], block_values[row].swapaxes(0, 1)], axis=1)
        for slot in range(WIDTH):
            visible = np.concatenate([in_context[row, slot, :length], in_block[slot]])
            np.testing.assert_allclose(
                found[row, slot], _attend(query[row, slot], all_keys, all_values, visible), rtol=0, atol=1e-5
            )
    if mask.window == 2:
        fewer = block_attention(asked[:, :2], own_keys, own_values, cache, 0, mask=mask, origin=origin, scale=SCALE)
        np.testing.assert_allclose(fewer, found[:, :2], rtol=0, atol=1e-6)


@pytest.mark.parametrize("window", [None, 3])
def test_target_tokens_attend_to_their_row_up_to_themselves(window: int | None) -> None:
    cache, keys, values = _filled()
    positions = np.asarray([[6, 7, 8], [PADDING_POSITION] * 3, [2, 4, PADDING_POSITION]], np.int32)
    batch = RaggedBatch.rectangle(jnp.zeros((ROWS, 3), jnp.int32), jnp.asarray(positions))
    query = np.random.default_rng(2).normal(size=(ROWS * 3, HEADS, HEAD_DIM)).astype(np.float32)
    found = np.asarray(paged_attention(jnp.asarray(query), cache, 0, batch, scale=SCALE, window=window))
    for row in (0, 2):
        for token, position in enumerate(positions[row]):
            if position != PADDING_POSITION:
                key = np.arange(LENGTHS[row])
                visible = (key <= position) & (position - key < (window or 100))
                wanted = _attend(query[row * 3 + token], keys[row], values[row], visible)
                np.testing.assert_allclose(found[row * 3 + token], wanted, rtol=0, atol=1e-5)
    assert np.isfinite(found).all(), "a query that sees nothing gives finite numbers"


def test_positions_without_a_page_and_inert_tokens_store_nothing() -> None:
    cache, _, _ = _filled()
    before = [np.asarray(pool) for pool in (*cache.pages.keys, *cache.pages.values)]
    # Row 0 beyond its table, row 1 without pages, row 2 on an unassigned page, and an inert token.
    batch = RaggedBatch.rectangle(
        jnp.zeros((ROWS, 2), jnp.int32), jnp.asarray([[12, 40], [0, 3], [8, PADDING_POSITION]], jnp.int32)
    )
    ones: Any = jnp.ones((6, KV_HEADS, HEAD_DIM))
    after = cache.write(0, batch, ones, ones)
    for old, new in zip(before, (*after.pages.keys, *after.pages.values), strict=True):
        np.testing.assert_array_equal(old, new)


def test_rows_that_share_a_page_read_the_same_content() -> None:
    cache, keys, _ = _filled()
    shared = dataclasses.replace(cache, page_table=jnp.asarray([TABLE[0], TABLE[0], TABLE[2]], jnp.int32))
    read, _ = shared.read(0)
    np.testing.assert_array_equal(read[0], read[1])
    np.testing.assert_array_equal(read[1, :, : LENGTHS[0]], keys[0])
