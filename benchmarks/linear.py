"""What the products of a decoding step cost, by orientation of the kernels, dtype and number of rows."""

from __future__ import annotations

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.pipelines.bench.probes import alternating_medians
from dspark_jax.speculators_common.numerics.matmul import OutputMajorKernel, kernel_parameter, kernel_product
from dspark_jax.speculators_common.numerics.platform import Platform, default_platform

# (in, out, how many) of the demo target: qkv, attention output, gate and up, down, head.
SIZES = ((576, 960, 30), (576, 576, 30), (576, 3072, 30), (1536, 576, 30), (576, 49_152, 1))


def products(
    in_features: int, out_features: int, count: int, rows: int, dtype: str, output_major: bool, platform: Platform
) -> Any:
    """A compiled call of `count` linear maps of the same rows."""
    values = [jax.random.normal(jax.random.key(seed), (in_features, out_features), dtype) for seed in range(count)]
    kernels = [OutputMajorKernel(value.T) if output_major else nnx.Param(value) for value in values]
    graphdefs, states = zip(*(nnx.split(kernel) for kernel in kernels), strict=True)

    @jax.jit
    def run(states: Any, x: Any) -> Any:
        return [
            kernel_product(x, nnx.merge(graphdef, state), platform)
            for graphdef, state in zip(graphdefs, states, strict=True)
        ]

    return functools.partial(run, states, jax.random.normal(jax.random.key(99), (rows, in_features), jnp.float32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    platform = default_platform()
    print(f"{platform.name}: ms, weights read in GB/s in brackets; * is the orientation in use")
    print(f"{'in x out x count':<20}{'dtype':<10}{'rows':>5}{'[in, out]':>20}{'[out, in]':>20}")
    for size in SIZES:
        for dtype in ("float32", "bfloat16"):
            in_use = isinstance(kernel_parameter(jnp.zeros(size[:2], dtype), platform), OutputMajorKernel)
            gigabytes = size[0] * size[1] * size[2] * jnp.dtype(dtype).itemsize / 1e9
            for rows in args.rows:
                medians = alternating_medians(
                    {major: products(*size, rows, dtype, major, platform) for major in (False, True)}, args.repeats
                )
                cells = (
                    f"{medians[major] * 1e3:.2f} ({gigabytes / medians[major]:.1f}){'*' if major == in_use else ' '}"
                    for major in (False, True)
                )
                print(
                    f"{' x '.join(map(str, size)):<20}{dtype:<10}{rows:>5}" + "".join(f"{cell:>20}" for cell in cells)
                )


if __name__ == "__main__":
    main()
