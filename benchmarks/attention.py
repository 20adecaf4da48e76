"""The cost of a paged cache in a round: writing, gathering pages, and attention, by page size and allocated length.

Every variant is one program over all layers with donated pages. The cost depends on the allocated length, not on the
length in use.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.architectures.nn.attention.kv_cache import KVCache, KVPages
from dspark_jax.architectures.nn.attention.kv_params import KVParams
from dspark_jax.architectures.nn.attention.ragged_batch import RaggedBatch
from dspark_jax.pipelines.bench.probes import alternating_medians


def work(
    part: str, num_layers: int, pages: KVPages, table: Any, batch: RaggedBatch, query: Any, rows: Any
) -> tuple[KVPages, Any]:
    """Write the batch in every layer, then do nothing more (`write`), gather (`read`) or attend (`attend`).

    The result depends on all of it, so that XLA removes nothing.
    """
    cache = KVCache(pages=pages, page_table=table, lengths=batch.positions[:1])
    total = jnp.zeros((), jnp.float32)
    for layer in range(num_layers):
        cache = cache.write(layer, batch, rows, rows)
        if part == "read":
            # One gathered row is used, and which one is not known at compile time: XLA cannot gather that row alone.
            total += sum(
                jax.lax.optimization_barrier(x)[0, 0, batch.positions[0], 0].astype(jnp.float32)
                for x in cache.read(layer)
            )
        elif part == "attend":
            total += jnp.sum(
                cache.paged_attention(layer, query, batch, scale=query.shape[-1] ** -0.5).astype(jnp.float32)
            )
    return cache.pages, total


class Variant:
    """A program and the pages that it donates and returns."""

    def __init__(self, part: str, args: argparse.Namespace, page_size: int, length: int) -> None:
        count = -(-length // page_size)
        dtype = jnp.dtype(args.dtype)
        params = KVParams(
            num_layers=args.layers,
            num_key_value_heads=args.kv_heads,
            head_dim=args.head_dim,
            page_size=page_size,
            dtype=dtype,
        )
        self.pages = KVPages.zeros(params, count)
        self.table = jnp.arange(count, dtype=jnp.int32)[None, :]
        positions = jnp.arange(args.rows, dtype=jnp.int32)[None, :] + length // 2
        self.batch = RaggedBatch.rectangle(jnp.zeros_like(positions), positions)
        self.query = jnp.ones((args.rows, args.query_heads, args.head_dim), dtype)
        self.new = jnp.ones((args.rows, args.kv_heads, args.head_dim), dtype)
        self.program = jax.jit(functools.partial(work, part, args.layers), donate_argnums=0)

    def __call__(self) -> Any:
        self.pages, total = self.program(self.pages, self.table, self.batch, self.query, self.new)
        return self.pages, total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("layers", 30),
        ("query-heads", 9),
        ("kv-heads", 3),
        ("head-dim", 64),
        ("rows", 7),
        ("repeats", 15),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    print(
        f"{args.layers} layers, {args.rows} rows, {args.dtype}, {jax.default_backend()}: ms, ratio to page size "
        f"{args.page_sizes[0]} in brackets"
    )
    print(
        f"{'allocated':>9} {'page':>5}" + "".join(f"{part:>18}" for part in ("write", "write + read", "write + attend"))
    )
    for length in args.lengths:
        variants = {
            (part, size): Variant(part, args, size, length)
            for size in args.page_sizes
            for part in ("write", "read", "attend")
        }
        medians = alternating_medians(variants, args.repeats)
        for size in args.page_sizes:
            cells = (
                f"{medians[part, size] * 1e3:10.2f} ({medians[part, size] / medians[part, args.page_sizes[0]]:4.2f})"
                for part in ("write", "read", "attend")
            )
            print(f"{length:>9} {size:>5}" + "".join(f"{cell:>18}" for cell in cells))


if __name__ == "__main__":
    main()
