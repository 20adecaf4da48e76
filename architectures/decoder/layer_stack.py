"""Running a stack of layers over the residual stream, with taps on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dspark_jax.architectures.nn.attention.kv_cache import KVCache

LayerCall = Callable[[Float[Array, "T H"], KVCache], tuple[Float[Array, "T H"], KVCache]]


def run_layers(
    calls: Sequence[LayerCall], x: Float[Array, "T H"], cache: KVCache, taps: tuple[int, ...]
) -> tuple[Float[Array, "T H"], Float[Array, "T mH"], KVCache]:
    """The stream after all layers, the stream after each of `taps` layers (0 = `x` itself) side by side, and the cache
    with the batch written.

    The stream is float32 in every dtype; products round their own operands. XLA drops a rounding to bfloat16 and back
    wherever it fuses over it, so a rounded stream would depend on the program: on the taps that are read, on the rows
    that are verified, and the same text would part at near-ties.
    """
    x = x.astype(jnp.float32)
    streams = {0: x}
    for index, call in enumerate(calls):
        with jax.named_scope(f"layer{index}"):
            x, cache = call(x, cache)
        streams[index + 1] = x
    tapped = jnp.concatenate([streams[tap] for tap in taps], axis=-1) if taps else jnp.zeros((x.shape[0], 0), x.dtype)
    return x, tapped, cache
