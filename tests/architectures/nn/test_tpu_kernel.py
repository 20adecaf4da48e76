"""The paged attention kernel for TPUs, interpreted, against attention in float64 over the keys that a query sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.architectures.nn.attention.backends import tpu_kernel
from dspark_jax.architectures.nn.attention.backends.partial import NOTHING_SEEN, dense_attention, merged
from dspark_jax.architectures.nn.attention.backends.tpu_kernel import context_attention
from dspark_jax.architectures.nn.attention.masks import VisibleRange
from tests.support.interpreted_kernels import interpreted_kernels, lowering_for_tpu

SCALE = 0.2
LENGTHS = (40, 0, 1, 8, 23)  # positions of every row: 0 to 5 pages of 8
PAGE_SIZE, TABLE_WIDTH = 8, 6


@pytest.fixture
def interpreted() -> Iterator[None]:
    jax.clear_caches()  # a cached kernel has the sizes of the test that traced it
    with interpreted_kernels(simulated_memory=True):
        yield


_INTERPRETED = pytest.mark.usefixtures("interpreted")


@dataclasses.dataclass(frozen=True)
class Case:
    """Random pages, and queries with the range of positions that each of them sees."""

    pool: np.ndarray  # [pages, page, 2 * K * hd], float32
    table: np.ndarray
    query: np.ndarray  # [B, L, N, hd]
    first: np.ndarray
    end: np.ndarray

    @classmethod
    def random(cls, heads: int, kv_heads: int, head_dim: int, length: int, window: int | None = None) -> Case:
        """Rows own scattered pages; what no row owns is NaN. The last query of every row sees nothing."""
        rng = np.random.default_rng(heads + head_dim)
        num_pages = 20
        free = iter(rng.permutation(num_pages))
        table = np.full((len(LENGTHS), TABLE_WIDTH), num_pages, np.int32)
        pool = np.full((num_pages, PAGE_SIZE, 2 * kv_heads * head_dim), np.nan, np.float32)
        for row, positions in enumerate(LENGTHS):
            for index in range(-(-positions // PAGE_SIZE)):
                table[row, index] = next(free)
                pool[table[row, index]] = rng.normal(size=pool.shape[1:])
        end = np.maximum(np.asarray(LENGTHS)[:, None] - rng.integers(0, 3, (len(LENGTHS), length)), 0)
        end[:, -1] = 0
        first = np.zeros_like(end) if window is None else np.maximum(end - window, 0)
        query = rng.normal(size=(len(LENGTHS), length, heads, head_dim)).astype(np.float32)
        return cls(pool, table, query, first.astype(np.int32), end.astype(np.int32))

    def found(self, dtype: Any = jnp.float32) -> Any:
        """What the kernel says."""
        visible = VisibleRange(jnp.asarray(self.first), jnp.asarray(self.end))
        pool, query = jnp.asarray(self.pool, dtype), jnp.asarray(self.query, dtype)
        return context_attention(pool, jnp.asarray(self.table), query, visible, scale=SCALE)

    def wanted(self, row: int, index: int, dtype: Any = jnp.float32) -> tuple[np.ndarray, np.ndarray]:
        """Attention and log-sum of one query, in float64, from operands that are rounded to `dtype`."""
        pool, query = (np.asarray(jnp.asarray(part, dtype), np.float64) for part in (self.pool, self.query))
        heads, head_dim = query.shape[2:]
        pages = self.table[row][: -(-LENGTHS[row] // PAGE_SIZE)]
        lines = pool[pages].reshape(-1, pool.shape[2] // (2 * head_dim), 2, head_dim)
        seen = lines[self.first[row, index] : max(self.end[row, index], self.first[row, index])]
        values, log_sum = np.zeros((heads, head_dim)), np.full(heads, NOTHING_SEEN)
        for head in range(heads if len(seen) else 0):
            shared = head // (heads // lines.shape[1])
            scores = seen[:, shared, 0] @ query[row, index, head] * SCALE
            weights = np.exp(scores - scores.max())
            values[head] = weights @ seen[:, shared, 1] / weights.sum()
            log_sum[head] = scores.max() + np.log(weights.sum())
        return values, log_sum

    def check(self) -> None:
        """Every query within 2e-5 of float64."""
        found = self.found()
        for row in range(len(LENGTHS)):
            for index in range(self.query.shape[1]):
                values, log_sum = self.wanted(row, index)
                np.testing.assert_allclose(found.values[row, index], values, rtol=0, atol=2e-5)
                np.testing.assert_allclose(found.log_sum[row, index], log_sum, rtol=1e-6, atol=2e-5)


@_INTERPRETED
@pytest.mark.parametrize("window", [None, 5, 11])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [
        (9, 3, 64),
        pytest.param(32, 8, 128, marks=pytest.mark.thorough),
        pytest.param(4, 1, 256, marks=pytest.mark.thorough),
        pytest.param(2, 2, 96, marks=pytest.mark.thorough),
    ],
)
def test_queries_attend_to_the_positions_that_they_see(
    heads: int, kv_heads: int, head_dim: int, window: int | None
) -> None:
    """Rows of 0 to 5 pages; pages that no row owns are NaN, and change nothing."""
    Case.random(heads, kv_heads, head_dim, 3, window).check()


@_INTERPRETED
def test_bfloat16_is_within_one_unit_of_the_last_place_of_float64() -> None:
    """A unit of the largest value that a head averages: averages near 0 cancel."""
    case = Case.random(8, 2, 128, 3)
    found = case.found(jnp.bfloat16)
    for row in range(len(LENGTHS)):
        for index in range(3):
            values, _ = case.wanted(row, index, jnp.bfloat16)
            np.testing.assert_allclose(found.values[row, index], values, rtol=2**-8, atol=2**-8)


@_INTERPRETED
@pytest.mark.parametrize("step_pages", [1, 2, 3])
def test_the_number_of_pages_of_a_step_changes_nothing(monkeypatch: pytest.MonkeyPatch, step_pages: int) -> None:
    monkeypatch.setattr(tpu_kernel, "_STEP_PAGES", step_pages)
    Case.random(4, 2, 16, 3, 20).check()


@_INTERPRETED
def test_long_rows_of_queries_are_cut_into_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu_kernel, "_MAX_SCORE_ROWS", 12)
    Case.random(4, 2, 16, 7).check()


@_INTERPRETED
def test_rows_may_share_pages() -> None:
    case = Case.random(4, 2, 16, 2)
    case.table[4, :2] = case.table[0, :2]
    case.check()


@_INTERPRETED
def test_parts_merge_to_the_attention_over_all_keys() -> None:
    """Pages up to a position, and dense keys from there; in a row without context the dense keys alone."""
    case = Case.random(4, 2, 16, 3)
    rng = np.random.default_rng(5)
    keys, values = (jnp.asarray(rng.normal(size=(len(LENGTHS), 3, 2, 16)), jnp.float32) for _ in range(2))
    seen = np.tril(np.ones((3, 3), bool))
    dense = dense_attention(jnp.asarray(case.query), keys, values, jnp.asarray(seen), scale=SCALE)
    found = merged([case.found(), dense])
    for row in range(len(LENGTHS)):
        for index in range(3):
            pages = case.table[row][: -(-LENGTHS[row] // PAGE_SIZE)]
            lines = case.pool[pages].reshape(-1, 2, 2, 16)[: case.end[row, index]]
            own = np.stack([keys[row], values[row]], axis=2)[seen[index]]
            joined = np.concatenate([lines, own])
            for head in range(4):
                scores = joined[:, head // 2, 0] @ case.query[row, index, head] * SCALE
                weights = np.exp(scores - scores.max())
                wanted = weights @ joined[:, head // 2, 1] / weights.sum()
                np.testing.assert_allclose(found[row, index, head], wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (32, 8, 128), (16, 8, 256)])
def test_the_kernel_lowers_for_a_tpu_without_one(heads: int, kv_heads: int, head_dim: int) -> None:
    """Block shapes and operations are those that the compiler for TPUs accepts; nothing is gathered."""
    shape = jax.ShapeDtypeStruct
    bounds = shape((2, 8), jnp.int32)

    def attend(pool: Any, table: Any, query: Any, first: Any, end: Any) -> Any:
        return context_attention(pool, table, query, VisibleRange(first, end), scale=SCALE)

    pool = shape((64, 64, 2 * kv_heads * head_dim), jnp.bfloat16)
    query = shape((2, 8, heads, head_dim), jnp.bfloat16)
    with lowering_for_tpu():
        traced = jax.jit(attend).trace(pool, shape((2, 32), jnp.int32), query, bounds, bounds)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 1
    assert "gather" not in text
