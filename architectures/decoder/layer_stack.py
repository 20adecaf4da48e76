"""Run the layers of a target one after the other, and collect the taps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dspark_jax.architectures.nn.attention.kv_cache import KVCache

LayerCall = Callable[[Float[Array, "T H"], KVCache], tuple[Float[Array, "T H"], KVCache]]
"""One layer: (residual stream, cache) -> (residual stream after the layer, cache with its keys and values)."""


def run_layers(
    calls: Sequence[LayerCall], x: Float[Array, "T H"], cache: KVCache, taps: tuple[int, ...]
) -> tuple[Float[Array, "T H"], Float[Array, "T mH"], KVCache]:
    """The residual stream after all layers, the concatenated taps, and the cache with the batch stored.

    `x` is the residual stream before the first layer. Tap `j` is the stream after `j` layers; tap 0 is `x`.

    The stream is float32 even if the parameters are bfloat16; each product rounds its own operands. XLA removes a
    rounding to bfloat16 that it can fuse with the conversion back. So the values of a bfloat16 stream would depend on
    the program, for example on the taps and on the number of rows, and the generated text could change where two logits
    are nearly equal.
    """
    x = x.astype(jnp.float32)
    streams = {0: x}
    for index, call in enumerate(calls):
        with jax.named_scope(f"layer{index}"):
            x, cache = call(x, cache)
        streams[index + 1] = x
    tapped = jnp.concatenate([streams[tap] for tap in taps], axis=-1) if taps else jnp.zeros((x.shape[0], 0), x.dtype)
    return x, tapped, cache
