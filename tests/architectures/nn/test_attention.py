"""Every attention backend, and attention over a dense context, against a loop over rows, heads and keys.

The tests run for every backend in `BACKENDS`. They do not depend on the layout of its pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.architectures.nn.attention.backends.backend import AttentionBackend, AttentionCase
from dspark_jax.architectures.nn.attention.backends.registry import BACKENDS, attention_backend
from dspark_jax.architectures.nn.attention.backends.xla import XlaHeadMajor
from dspark_jax.architectures.nn.attention.block_context import BlockContext, DenseContext
from dspark_jax.architectures.nn.attention.kv_cache import KVCache, KVPages
from dspark_jax.architectures.nn.attention.kv_params import KVParams
from dspark_jax.architectures.nn.attention.masks import block_mask, context_mask
from dspark_jax.architectures.nn.attention.ragged_batch import PADDING_POSITION, RaggedBatch
from dspark_jax.speculators_common.formats.draft_config import LayerMask, WindowOrigin
from dspark_jax.speculators_common.numerics.platform import Platform, SoftmaxForm
from tests.support.interpreted_kernels import interpreted_kernels

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, WIDTH, SCALE = 4, 2, 8, 4, 3, 0.3
LENGTHS = (9, 0, 5)
ROWS = len(LENGTHS)
# Rows own scattered pages; 12 is one beyond the pool: unassigned.
TABLE = np.asarray([[7, 2, 11], [12, 12, 12], [0, 5, 12]], np.int32)

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[AttentionBackend]:
    """Every backend, with the platform that names it. Kernels for TPUs are interpreted."""
    platforms = [Platform.of(name) for name in ("cpu", "tpu", "gpu")]
    with interpreted_kernels(simulated_memory=True):
        yield attention_backend(next(platform for platform in platforms if platform.attention == request.param))


def _params(backend: AttentionBackend, **changes: Any) -> KVParams:
    sizes: dict[str, Any] = {
        "num_layers": 1,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "page_size": PAGE_SIZE,
        "dtype": jnp.float32,
    }
    return KVParams(**{**sizes, **changes}, platform=backend.platform)


def _filled(backend: AttentionBackend) -> tuple[KVCache, list[np.ndarray], list[np.ndarray]]:
    """A cache with random values at positions below LENGTHS, and the keys and values of each row, `[K, P, hd]`."""
    rng = np.random.default_rng(0)
    cache = KVCache(
        pages=KVPages.zeros(_params(backend), 12),
        page_table=jnp.asarray(TABLE),
        lengths=jnp.asarray(LENGTHS, jnp.int32),
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
    """The attention of one query `[N, hd]` over keys `[K, S, hd]`."""
    out = np.zeros_like(query)
    for head in range(HEADS):
        shared = head // (HEADS // KV_HEADS)
        scores = keys[shared][visible] @ query[head] * SCALE
        weights = np.exp(scores - scores.max())
        out[head] = weights @ values[shared][visible] / weights.sum()
    return out


MASKS = [LayerMask(), LayerMask(causal=True), LayerMask(window=4), LayerMask(window=2, causal=True)]


def _check_block(context: BlockContext, keys: Any, values: Any, mask: LayerMask, origin: WindowOrigin) -> None:
    """Check every slot of a random block against attention over the keys that the masks allow it to see."""
    rng = np.random.default_rng(1)
    query = rng.normal(size=(ROWS, WIDTH, HEADS, HEAD_DIM)).astype(np.float32)
    block_keys, block_values = (rng.normal(size=(ROWS, WIDTH, KV_HEADS, HEAD_DIM)).astype(np.float32) for _ in range(2))
    asked, own_keys, own_values = (jnp.asarray(part) for part in (query, block_keys, block_values))
    rule: dict[str, Any] = {"mask": mask, "origin": origin, "scale": SCALE}
    found = np.asarray(context.block_attention(0, asked, own_keys, own_values, **rule))
    positions = jnp.arange(max(LENGTHS), dtype=jnp.int32)[None]
    in_context = np.asarray(context_mask(context.lengths, WIDTH, positions, mask, origin))
    in_block = np.asarray(block_mask(WIDTH, mask, origin))
    for row, length in enumerate(LENGTHS):
        all_keys = np.concatenate([keys[row], block_keys[row].swapaxes(0, 1)], axis=1)
        all_values = np.concatenate([values[row], block_values[row].swapaxes(0, 1)], axis=1)
        for slot in range(WIDTH):
            visible = np.concatenate([in_context[row, slot, :length], in_block[slot]])
            np.testing.assert_allclose(
                found[row, slot], _attend(query[row, slot], all_keys, all_values, visible), rtol=0, atol=1e-5
            )
    fewer = context.block_attention(0, asked[:, :2], own_keys, own_values, **rule)
    np.testing.assert_allclose(fewer, found[:, :2], rtol=0, atol=1e-6)


@pytest.mark.parametrize("origin", ["anchor", "query"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_block_slots_attend_to_their_context_and_their_block(
    backend: AttentionBackend, mask: LayerMask, origin: WindowOrigin
) -> None:
    cache, keys, values = _filled(backend)
    _check_block(cache, keys, values, mask, origin)


@pytest.mark.parametrize("softmax", ["row_independent", "ordinary"])
@pytest.mark.parametrize("origin", ["anchor", "query"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_context_without_pages_is_seen_by_the_same_rules(
    mask: LayerMask, origin: WindowOrigin, softmax: SoftmaxForm
) -> None:
    """As in training: contexts of several lengths, padded on the left, at any absolute positions."""
    _, keys, values = _filled(attention_backend(Platform.of("cpu")))
    longest, offset = max(LENGTHS), 100
    lines = [np.full((ROWS, KV_HEADS, longest, HEAD_DIM), 7, np.float32) for _ in range(2)]
    positions = np.full((ROWS, longest), PADDING_POSITION, np.int32)
    for row, length in enumerate(LENGTHS):
        if length:
            for line, part in zip(lines, (keys, values), strict=True):
                line[row, :, longest - length :] = part[row]
            positions[row, longest - length :] = np.arange(length)
    given = (jnp.asarray(lines[0]), jnp.asarray(lines[1]))
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    context = DenseContext(keys_values=(given,), positions=jnp.asarray(positions), lengths=lengths, softmax=softmax)
    _check_block(context, keys, values, mask, origin)
    moved = dataclasses.replace(
        context,
        positions=jnp.where(context.positions < 0, PADDING_POSITION, context.positions + offset),
        lengths=lengths + offset,
    )
    query = jnp.ones((ROWS, WIDTH, HEADS, HEAD_DIM))
    own = jnp.ones((ROWS, WIDTH, KV_HEADS, HEAD_DIM))
    rule: dict[str, Any] = {"mask": mask, "origin": origin, "scale": SCALE}
    np.testing.assert_array_equal(
        moved.block_attention(0, query, own, own, **rule), context.block_attention(0, query, own, own, **rule)
    )


@pytest.mark.parametrize("window", [None, 3])
def test_target_tokens_attend_to_their_row_up_to_themselves(backend: AttentionBackend, window: int | None) -> None:
    cache, keys, values = _filled(backend)
    positions = np.asarray([[6, 7, 8], [PADDING_POSITION] * 3, [2, 4, PADDING_POSITION]], np.int32)
    batch = RaggedBatch.rectangle(jnp.zeros((ROWS, 3), jnp.int32), jnp.asarray(positions))
    query = np.random.default_rng(2).normal(size=(ROWS * 3, HEADS, HEAD_DIM)).astype(np.float32)
    found = np.asarray(cache.paged_attention(0, jnp.asarray(query), batch, scale=SCALE, window=window))
    for row in (0, 2):
        for token, position in enumerate(positions[row]):
            if position != PADDING_POSITION:
                key = np.arange(LENGTHS[row])
                visible = (key <= position) & (position - key < (window or 100))
                wanted = _attend(query[row * 3 + token], keys[row], values[row], visible)
                np.testing.assert_allclose(found[row * 3 + token], wanted, rtol=0, atol=1e-5)
    assert np.isfinite(found).all(), "a query that sees nothing gives finite numbers"


def test_positions_without_a_page_and_inert_tokens_store_nothing(backend: AttentionBackend) -> None:
    cache, _, _ = _filled(backend)
    before = [np.asarray(pool) for pool in jax.tree.leaves(cache.pages)]
    # Row 0 beyond its table, row 1 without pages, row 2 on an unassigned page, and an inert token.
    batch = RaggedBatch.rectangle(
        jnp.zeros((ROWS, 2), jnp.int32), jnp.asarray([[12, 40], [0, 3], [8, PADDING_POSITION]], jnp.int32)
    )
    ones: Any = jnp.ones((6, KV_HEADS, HEAD_DIM))
    after = cache.write(0, batch, ones, ones)
    for old, new in zip(before, jax.tree.leaves(after.pages), strict=True):
        np.testing.assert_array_equal(old, new)


def test_rows_that_share_a_page_read_the_same_content(backend: AttentionBackend) -> None:
    cache, keys, _ = _filled(backend)
    shared = dataclasses.replace(cache, page_table=jnp.asarray([TABLE[0], TABLE[0], TABLE[2]], jnp.int32))
    read, _ = shared.read(0)
    np.testing.assert_array_equal(read[0], read[1])
    np.testing.assert_array_equal(read[1, :, : LENGTHS[0]], keys[0])


def test_pages_lead_with_the_page_axis_and_know_their_sizes(backend: AttentionBackend) -> None:
    """Two layers of different geometry. The sizes are Python numbers, so shapes without arrays are enough."""
    params = _params(backend, num_layers=2, num_key_value_heads=(2, 1), head_dim=(8, 16))
    pages = jax.eval_shape(lambda: KVPages.zeros(params, 12))
    assert (pages.num_pages, pages.page_size) == (12, PAGE_SIZE)
    assert pages.layer_shapes == ((2, 8), (1, 16))
    assert {pool.shape[0] for pool in jax.tree.leaves(pages)} == {12}
    assert sum(pool.size * pool.dtype.itemsize for pool in jax.tree.leaves(pages)) == 12 * params.bytes_per_page()
    assert pages.platform == backend.platform


def test_what_is_written_is_read_whatever_the_platform_stores(backend: AttentionBackend) -> None:
    params = _params(backend, dtype=jnp.bfloat16)
    cache = KVCache(
        pages=KVPages.zeros(params, 3), page_table=jnp.asarray([[2, 0]], jnp.int32), lengths=jnp.zeros((1,), jnp.int32)
    )
    assert {pool.dtype for pool in jax.tree.leaves(cache.pages)} == {backend.platform.row_dtype(jnp.bfloat16)}
    keys, values = np.random.default_rng(3).normal(size=(2, 6, KV_HEADS, HEAD_DIM)).astype(np.float32)
    keys[1, 0, 0] = np.nan
    batch = RaggedBatch.rectangle(jnp.zeros((1, 6), jnp.int32), jnp.arange(6, dtype=jnp.int32)[None])
    found = cache.write(0, batch, jnp.asarray(keys), jnp.asarray(values)).read(0)
    keys[1, 0, 0] = 0
    for part, wanted in zip(found, (keys, values), strict=True):
        assert part.dtype == jnp.bfloat16
        np.testing.assert_array_equal(part[0, :, :6], jnp.asarray(wanted.swapaxes(0, 1), jnp.bfloat16))


class _WithoutWindows(XlaHeadMajor):
    name = "without-windows"

    def unsupported(self, case: AttentionCase) -> str | None:
        return None if case.window is None else f"window {case.window}: use {XlaHeadMajor.name}"


def test_a_case_that_a_backend_cannot_serve_is_refused_with_the_reason() -> None:
    cache, _, _ = _filled(_WithoutWindows(Platform.of("cpu")))
    cache = dataclasses.replace(
        cache, pages=dataclasses.replace(cache.pages, backend=_WithoutWindows(Platform.of("cpu")))
    )
    batch = RaggedBatch.rectangle(jnp.zeros((ROWS, 1), jnp.int32), jnp.zeros((ROWS, 1), jnp.int32))
    query, own = jnp.ones((ROWS, HEADS, HEAD_DIM)), jnp.ones((ROWS, 1, KV_HEADS, HEAD_DIM))
    assert cache.paged_attention(0, query, batch, scale=SCALE).shape == query.shape
    with pytest.raises(
        NotImplementedError, match=r"paged_attention by the attention backend without-windows: window 3"
    ):
        cache.paged_attention(0, query, batch, scale=SCALE, window=3)
    with pytest.raises(NotImplementedError, match=r"block_attention by .*: window 5: use xla-head-major"):
        cache.block_attention(0, query[:, None], own, own, mask=LayerMask(window=5), origin="anchor", scale=SCALE)


def test_a_platform_whose_backend_does_not_exist_is_refused() -> None:
    platform = dataclasses.replace(Platform.of("tpu"), attention="none-such")
    with pytest.raises(NotImplementedError, match=r"platform tpu: found 'none-such', allowed xla-head-major, xla-slot"):
        attention_backend(platform)
