"""The geometry of one model's KV cache."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from dspark_jax.speculators_common.numerics.platform import Platform, default_platform


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVParams:
    """The geometry of one model's KV cache. A number holds for all storing layers, a tuple has one entry for each."""

    num_layers: int  # number of layers that store keys and values
    num_key_value_heads: int | tuple[int, ...]  # K
    head_dim: int | tuple[int, ...]  # hd
    page_size: int = 64  # positions
    dtype: DTypeLike = jnp.bfloat16
    # Decides the attention backend, and so the layout of a page.
    platform: Platform = dataclasses.field(default_factory=default_platform)

    @property
    def layer_shapes(self) -> tuple[tuple[int, int], ...]:
        """(K, hd) of every storing layer."""
        return tuple(zip(self._per_layer(self.num_key_value_heads), self._per_layer(self.head_dim), strict=True))

    def bytes_per_page(self) -> int:
        """Bytes of one page id: keys and values of all layers."""
        per_position = sum(heads * head_dim for heads, head_dim in self.layer_shapes)
        return 2 * per_position * self.page_size * jnp.dtype(self.dtype).itemsize

    def _per_layer(self, size: int | tuple[int, ...]) -> tuple[int, ...]:
        return size if isinstance(size, tuple) else (size,) * self.num_layers
