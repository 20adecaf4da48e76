"""Attention of the queries of a row over a range of positions in its pages: a Pallas kernel for TPUs.

One kernel serves the verification, the prompt chunks and the context of a draft block, because every query states the
range of positions that it sees. Pages are read where they are, once for all queries and heads of a row, and only as far
as the row has positions that some query sees: nothing is gathered, and a longer page table costs nothing.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from dspark_jax.architectures.nn.attention.backends.partial import NOTHING_SEEN, PartialAttention, exact_precision
from dspark_jax.architectures.nn.attention.masks import VisibleRange

_LANES = 128
# Positions of a step are read together. More of them hide the fixed cost of a step, and need more fast memory.
_STEP_BYTES, _STEP_POSITIONS, _STEP_PAGES = 2 * 2**20, 512, 16
# Rows of scores (heads times queries) of one step. Longer rows of queries, as in prompts, are cut into parts.
_MAX_SCORE_ROWS = 4096
_FAST_MEMORY_BYTES = 64 * 2**20


class _Sizes(NamedTuple):
    """The static sizes of one kernel."""

    num_kv_heads: int
    head_dim: int
    page_size: int
    num_parts: int  # parts of the queries of a row
    part_rows: int  # rows of scores of one part and one key head: group times queries
    step_pages: int
    scale: float


@functools.partial(jax.jit, static_argnames="scale")
def context_attention(
    pool: Float[Array, "pages page heads_hd"],
    page_table: Int32[Array, "B P"],
    query: Float[Array, "B L N hd"],
    visible: VisibleRange,
    *,
    scale: float,
) -> PartialAttention:
    """Attention of all queries of every row over the positions in the row's pages that each of them sees.

    A line of the pool holds a position: key and value of head 0, key and value of head 1, and so on. Products take
    operands in the dtype of the pool; scores, softmax and sums are float32. `scale` multiplies the scores.
    """
    rows, length, num_heads, head_dim = query.shape
    page_size = pool.shape[1]
    num_kv_heads = pool.shape[2] // (2 * head_dim)
    group = num_heads // num_kv_heads
    num_parts = _num_parts(length, num_heads)
    part = -(-length // num_parts)
    sizes = _Sizes(
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        num_parts=num_parts,
        part_rows=group * part,
        step_pages=_step_pages(page_size, pool.shape[2], pool.dtype),
        scale=scale,
    )
    ranges = VisibleRange(*(_split(bound, num_parts, part) for bound in visible))
    start, count = _page_ranges(ranges, page_size, page_table.shape[1])
    queries = _split(query.astype(pool.dtype), num_parts, part).reshape(
        rows, num_parts, part, num_kv_heads, group, head_dim
    )
    queries = queries.transpose(0, 1, 3, 4, 2, 5).reshape(rows, num_parts, num_kv_heads, group * part, head_dim)
    bounds = jnp.stack([jnp.tile(bound, (1, 1, group)) for bound in ranges], axis=-1)
    table = jnp.clip(page_table, 0, pool.shape[0] - 1)
    values, log_sum = _call(pool, table, start, count, queries, bounds, sizes)
    values = values.reshape(rows, num_parts, num_kv_heads, group, part, head_dim).transpose(0, 1, 4, 2, 3, 5)
    log_sum = log_sum.reshape(rows, num_parts, num_kv_heads, group, part).transpose(0, 1, 4, 2, 3)
    return PartialAttention(
        values.reshape(rows, num_parts * part, num_heads, head_dim)[:, :length],
        log_sum.reshape(rows, num_parts * part, num_heads)[:, :length],
    )


def _num_parts(length: int, num_heads: int) -> int:
    return max(1, -(-length * num_heads // _MAX_SCORE_ROWS))


def _step_pages(page_size: int, width: int, dtype: DTypeLike) -> int:
    positions = min(_STEP_POSITIONS, _STEP_BYTES // (width * jnp.dtype(dtype).itemsize))
    return max(1, min(_STEP_PAGES, positions // page_size))


def _split(array: Any, num_parts: int, part: int) -> Any:
    """`[B, L, ...]` as `[B, parts, part, ...]`; what is added sees nothing, because its bounds are 0."""
    rows, length = array.shape[:2]
    padded = jnp.pad(array, [(0, 0), (0, num_parts * part - length), *[(0, 0)] * (array.ndim - 2)])
    return padded.reshape(rows, num_parts, part, *array.shape[2:])


def _page_ranges(
    ranges: VisibleRange, page_size: int, table_width: int
) -> tuple[Int32[Array, "B parts"], Int32[Array, "B parts"]]:
    """The first page (an index into the row's table) that some query of each part sees, and the number of pages."""
    sees = ranges.end > ranges.first
    end = jnp.max(jnp.where(sees, ranges.end, 0), axis=-1)
    first = jnp.min(jnp.where(sees, ranges.first, end[..., None]), axis=-1)
    start = jnp.maximum(first, 0) // page_size
    stop = jnp.minimum(-(-end // page_size), table_width)
    return start.astype(jnp.int32), jnp.maximum(stop - start, 0).astype(jnp.int32)


def _call(
    pool: Any, table: Any, start: Any, count: Any, queries: Any, bounds: Any, sizes: _Sizes
) -> tuple[Float[Array, "B parts K GL hd"], Float[Array, "B parts K GL 1"]]:
    rows, width = queries.shape[0], pool.shape[2]
    steps = jnp.maximum(-(-jnp.max(count) // sizes.step_pages), 1)
    of_part = (1, 1, sizes.num_kv_heads, sizes.part_rows)

    def page(number: int, row: Any, part: Any, step: Any, table: Any, start: Any, count: Any) -> Any:
        """The page that is read as the `number`-th of a step. A page id that repeats is not read again."""
        pages = count[row, part]
        last_step = jax.lax.div(jnp.maximum(pages - 1 - number, 0), sizes.step_pages)
        index = start[row, part] + jnp.where(
            number < pages, number + sizes.step_pages * jnp.minimum(step, last_step), 0
        )
        return jnp.where(pages > 0, table[row, index], 0), 0, 0

    def part_block(row: Any, part: Any, step: Any, *_: Any) -> Any:
        return row, part, 0, 0, 0

    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=(rows, sizes.num_parts, steps),
        in_specs=[
            pl.BlockSpec((*of_part, sizes.head_dim), part_block),
            pl.BlockSpec((1, 1, sizes.part_rows, 2), lambda row, part, step, *_: (row, part, 0, 0)),
            *(
                pl.BlockSpec((1, sizes.page_size, width), functools.partial(page, number))
                for number in range(sizes.step_pages)
            ),
        ],
        out_specs=[pl.BlockSpec((*of_part, sizes.head_dim), part_block), pl.BlockSpec((*of_part, 1), part_block)],
        scratch_shapes=[
            pltpu.VMEM((sizes.num_kv_heads, sizes.part_rows, _LANES), jnp.float32),
            pltpu.VMEM((sizes.num_kv_heads, sizes.part_rows, _LANES), jnp.float32),
            pltpu.VMEM((sizes.num_kv_heads, sizes.part_rows, sizes.head_dim), jnp.float32),
        ],
    )
    shapes = [
        jax.ShapeDtypeStruct(queries.shape, jnp.float32),
        jax.ShapeDtypeStruct((*queries.shape[:-1], 1), jnp.float32),
    ]
    call = pl.pallas_call(
        functools.partial(_kernel, sizes=sizes),
        shapes,
        grid_spec=grid,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=_FAST_MEMORY_BYTES
        ),
        cost_estimate=_cost(pool, table, queries, sizes),
        name="context_attention",
    )
    return call(table, start, count, queries, bounds, *[pool] * sizes.step_pages)


def _cost(pool: Any, table: Any, queries: Any, sizes: _Sizes) -> pl.CostEstimate:
    """The cost for rows that fill their page tables."""
    rows, parts = queries.shape[:2]
    positions = rows * parts * table.shape[1] * sizes.page_size
    scores = positions * sizes.num_kv_heads * sizes.part_rows
    read = positions * pool.shape[2] * pool.dtype.itemsize + queries.size * queries.dtype.itemsize
    return pl.CostEstimate(
        flops=4 * scores * sizes.head_dim, transcendentals=scores, bytes_accessed=read + 4 * queries.size
    )


def _kernel(_: Any, start: Any, count: Any, query: Any, bounds: Any, *refs: Any, sizes: _Sizes) -> None:
    """One step: all queries of a part against `step_pages` pages, with a running maximum and sum for every query."""
    pages, (values, log_sum), (largest, total, sums) = refs[:-5], refs[-5:-3], refs[-3:]
    row, part, step = pl.program_id(0), pl.program_id(1), pl.program_id(2)

    pl.when(step == 0)(functools.partial(_start, largest, total, sums))

    @pl.when(step * sizes.step_pages < count[row, part])
    def read_pages() -> None:
        first_position = (start[row, part] + step * sizes.step_pages) * sizes.page_size
        shape = (sizes.part_rows, sizes.step_pages * sizes.page_size)
        position = first_position + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        seen = (position >= bounds[0, 0, :, 0:1]) & (position < bounds[0, 0, :, 1:2])
        for head in range(sizes.num_kv_heads):
            keys, head_values = (_columns(pages, 2 * head + which, sizes.head_dim) for which in range(2))
            scores = _product(query[0, 0, head], keys, contract_last=True) * sizes.scale
            scores = jnp.where(seen, scores, NOTHING_SEEN)
            before = largest[head, :, 0:1]
            now = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
            weights = jnp.where(seen, jnp.exp(scores - now), 0.0)
            kept = jnp.exp(before - now)
            sum_now = kept * total[head, :, 0:1] + jnp.sum(weights, axis=1, keepdims=True)
            sums[head] = kept * sums[head] + _product(weights.astype(head_values.dtype), head_values)
            largest[head] = jnp.broadcast_to(now, largest.shape[1:])
            total[head] = jnp.broadcast_to(sum_now, total.shape[1:])

    @pl.when(step == pl.num_programs(2) - 1)
    def write_result() -> None:
        for head in range(sizes.num_kv_heads):
            weight = total[head, :, 0:1]
            is_empty = weight == 0.0
            divisor = jnp.where(is_empty, 1.0, weight)
            values[0, 0, head] = sums[head] / divisor
            log_sum[0, 0, head] = jnp.where(is_empty, NOTHING_SEEN, largest[head, :, 0:1] + jnp.log(divisor))


def _start(largest: Any, total: Any, sums: Any) -> None:
    largest[...] = jnp.full_like(largest, NOTHING_SEEN)
    total[...] = jnp.zeros_like(total)
    sums[...] = jnp.zeros_like(sums)


def _columns(pages: Any, index: int, head_dim: int) -> Any:
    """Columns `index * head_dim` and following of the pages of a step, page after page."""
    parts = [page[0, :, index * head_dim : (index + 1) * head_dim] for page in pages]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=0)


def _product(left: Any, right: Any, *, contract_last: bool = False) -> Any:
    precision = exact_precision(right)
    axes = (((1,), (1 if contract_last else 0,)), ((), ()))
    return jax.lax.dot_general(left, right, axes, precision=precision, preferred_element_type=jnp.float32)
