"""A fresh compact draft: the format's initial values, the same for a seed whatever the sequence head."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dspark_jax.architectures.dspark_compact.model import CompactDraft
from dspark_jax.architectures.dspark_compact.weights import compact_recipes
from dspark_jax.architectures.module_loading import load_module
from dspark_jax.speculators_common.formats.compact.format import (
    CompactDims,
    CompactSettings,
    compact_config,
    tensor_shapes,
)

_ONES = ("attn_norm", "ff_norm", "ctx_norm", "out_norm")
_ZEROS = ("markov.w2", "conf.w", "conf.b", "rnn.bH", "rnn.wO")


def dims_of(target: Any) -> CompactDims:
    """What a compact draft takes over from `target`, a module with a `config`."""
    config = target.config
    return CompactDims(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        num_layers=config.num_hidden_layers,
    )


def init(
    target: Any, settings: CompactSettings, target_id: str, seed: int = 0, *, dtype: DTypeLike = jnp.float32
) -> CompactDraft:
    """A fresh draft for `target`, called `target_id` in its files. Raises `CheckpointError` for settings that do not
    fit together.
    """
    return init_from_dims(dims_of(target), settings, target_id, seed, dtype=dtype)


def init_from_dims(
    dims: CompactDims, settings: CompactSettings, target_id: str, seed: int = 0, *, dtype: DTypeLike = jnp.float32
) -> CompactDraft:
    """The same without a target at hand.

    Weights are N(0, 0.02), norms one; what would bias the first proposals or confidences is zero, so that a draft
    starts without a sequence head. Each tensor has a random stream of its own: drafts of one seed agree in all tensors
    that they share.
    """
    config = compact_config(settings, dims, target_id=target_id)
    key = jax.random.key(seed)
    sources = {
        name: _Fresh(name=name, shape=shape, key=jax.random.fold_in(key, index))
        for index, (name, shape) in enumerate(tensor_shapes(config).items())
    }
    return load_module(
        lambda: CompactDraft(config, dtype=dtype), compact_recipes(config), sources, file="a fresh draft"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Fresh:
    """An initial tensor, drawn when it is read."""

    name: str
    shape: tuple[int, ...]
    key: Any
    dtype: str = "float32"

    def read(self) -> np.ndarray:
        if self.name.rsplit(".", 1)[-1] in _ONES or self.name in _ONES:
            return np.ones(self.shape, np.float32)
        if self.name in _ZEROS:
            return np.zeros(self.shape, np.float32)
        return np.asarray(0.02 * jax.random.normal(self.key, self.shape, jnp.float32))
