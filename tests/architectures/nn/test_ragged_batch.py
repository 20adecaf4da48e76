"""The packed and the rectangular batch are two layouts of the same tokens, and padding is inert in both."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.architectures.nn.attention.kv_cache import KVCache, KVPages
from dspark_jax.architectures.nn.attention.ragged_batch import PADDING_POSITION, RaggedBatch
from tests.support.random_pairs import VOCAB, random_target
from tests.support.tiny_checkpoints import load_pair

LENGTHS, STARTS, WIDTH = (3, 0, 5, 1), (0, 4, 2, 6), 6
ROWS, TOTAL, PADDED = len(LENGTHS), sum(LENGTHS), 12

pytestmark = pytest.mark.usefixtures("quick_compilation")


def _flat(padding_token: int = 0) -> RaggedBatch:
    """The tokens row after row, padded to 12."""
    row_of_token = np.repeat(np.arange(ROWS), LENGTHS)
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)])
    positions = np.concatenate([start + np.arange(length) for start, length in zip(STARTS, LENGTHS, strict=True)])
    surplus = PADDED - TOTAL
    return RaggedBatch(
        tokens=jnp.asarray(np.pad(_tokens(), (0, surplus), constant_values=padding_token), jnp.int32),
        positions=jnp.asarray(np.pad(positions, (0, surplus), constant_values=PADDING_POSITION), jnp.int32),
        row_of_token=jnp.asarray(np.pad(row_of_token, (0, surplus), constant_values=ROWS - 1), jnp.int32),
        row_offsets=jnp.asarray(offsets, jnp.int32),
        row_width=WIDTH,
    )


def _rectangle(padding_token: int = 0) -> RaggedBatch:
    tokens = np.full((ROWS, WIDTH), padding_token)
    positions = np.full((ROWS, WIDTH), PADDING_POSITION)
    for row, part in enumerate(np.split(_tokens(), np.cumsum(LENGTHS)[:-1])):
        tokens[row, : len(part)], positions[row, : len(part)] = part, STARTS[row] + np.arange(len(part))
    return RaggedBatch.rectangle(jnp.asarray(tokens, jnp.int32), jnp.asarray(positions, jnp.int32))


def _tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(1, VOCAB, TOTAL)


def _real(batch: RaggedBatch, per_token: Any) -> np.ndarray:
    """The entries of tokens that are not inert, in order of row and position."""
    return np.asarray(per_token)[np.asarray(batch.positions) != PADDING_POSITION]


@functools.cache
def _forward() -> Any:
    target, _ = load_pair(random_target(), None)
    return target, jax.jit(lambda batch, cache: target.forward(batch, cache, (0, 1, 2)))


def _run(batch: RaggedBatch) -> tuple[Any, Any, KVCache]:
    target, forward = _forward()
    cache = KVCache(
        pages=jax.tree.map(lambda pool: jnp.full_like(pool, 0.3), KVPages.zeros(target.kv_params(4), 12)),
        page_table=jnp.arange(12, dtype=jnp.int32).reshape(ROWS, 3),
        lengths=jnp.asarray(STARTS, jnp.int32),
    )
    result: tuple[Any, Any, KVCache] = forward(batch, cache)
    return result


def test_a_target_gives_the_same_for_both_forms() -> None:
    flat, rectangle = _flat(), _rectangle()
    (hidden, taps, cache), (wanted_hidden, wanted_taps, wanted_cache) = _run(flat), _run(rectangle)
    np.testing.assert_allclose(_real(flat, hidden), _real(rectangle, wanted_hidden), rtol=0, atol=1e-5)
    np.testing.assert_allclose(_real(flat, taps), _real(rectangle, wanted_taps), rtol=0, atol=1e-5)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=0, atol=1e-5), cache.pages, wanted_cache.pages
    )


@pytest.mark.parametrize("form", [_flat, _rectangle], ids=["flat", "rectangle"])
def test_padding_is_inert(form: Any) -> None:
    batch = form(0)
    (hidden, taps, cache), (other_hidden, other_taps, other_cache) = _run(batch), _run(form(VOCAB - 1))
    np.testing.assert_array_equal(_real(batch, hidden), _real(batch, other_hidden))
    np.testing.assert_array_equal(_real(batch, taps), _real(batch, other_taps))
    jax.tree.map(np.testing.assert_array_equal, cache.pages, other_cache.pages)
    assert np.isfinite(hidden).all()


def test_a_row_without_tokens_keeps_its_pages() -> None:
    for batch in (_flat(), _rectangle()):
        _, _, cache = _run(batch)
        for pool in jax.tree.leaves(cache.pages):
            np.testing.assert_array_equal(pool[3:6], np.float32(0.3))


@pytest.mark.parametrize("form", [_flat, _rectangle], ids=["flat", "rectangle"])
def test_row_wise_and_flat_form_are_inverse(form: Any) -> None:
    batch = form(0)
    by_row = batch.to_rows(batch.tokens)
    assert by_row.shape == (ROWS, WIDTH)
    parts = np.split(_tokens(), np.cumsum(LENGTHS)[:-1])
    for row, part in enumerate(parts):
        assert by_row[row, : len(part)].tolist() == part.tolist()
    np.testing.assert_array_equal(_real(batch, batch.to_flat(by_row)), _real(batch, batch.tokens))
    assert _real(batch, batch.index_in_row).tolist() == [index for length in LENGTHS for index in range(length)]
    assert batch.num_rows == ROWS


@pytest.mark.parametrize("form", [_flat, _rectangle], ids=["flat", "rectangle"])
def test_keeping_fewer_tokens_makes_the_others_inert(form: Any) -> None:
    batch = form(0)
    kept = batch.keep(jnp.asarray([2, 3, 0, 9], jnp.int32))
    wanted = [(0, 0), (0, 1), (3, 6)]
    alive = np.asarray(kept.positions) != PADDING_POSITION
    assert (
        list(
            zip(np.asarray(kept.row_of_token)[alive].tolist(), np.asarray(kept.positions)[alive].tolist(), strict=True)
        )
        == wanted
    )
    assert dataclasses.replace(kept, positions=batch.positions).tokens is batch.tokens
