"""Make a new compact draft with the initial values of the format."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dspark_jax.architectures.dspark_compact.model import CompactDraft
from dspark_jax.architectures.dspark_compact.weights import compact_recipes
from dspark_jax.architectures.module_loading import load_module
from dspark_jax.architectures.target_config import HasTargetConfig
from dspark_jax.speculators_common.formats.compact.format import (
    CompactDims,
    CompactSettings,
    compact_config,
    tensor_shapes,
)

_ONES = ("attn_norm", "ff_norm", "ctx_norm", "out_norm")
_ZEROS = ("markov.w2", "conf.w", "conf.b", "rnn.bH", "rnn.wO")


def dims_of(target: HasTargetConfig) -> CompactDims:
    """The sizes that a compact draft takes from `target`."""
    config = target.config
    return CompactDims(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        num_layers=config.num_hidden_layers,
    )


def init(
    target: HasTargetConfig, settings: CompactSettings, target_id: str, seed: int = 0, *, dtype: DTypeLike = jnp.float32
) -> CompactDraft:
    """A new draft for `target`; see `init_from_dims`."""
    return init_from_dims(dims_of(target), settings, target_id, seed, dtype=dtype)


def init_from_dims(
    dims: CompactDims, settings: CompactSettings, target_id: str, seed: int = 0, *, dtype: DTypeLike = jnp.float32
) -> CompactDraft:
    """A new draft for a target of the sizes `dims`, with parameters of `dtype`.

    `target_id` is the name of the target in the draft's files. Weights are normally distributed with mean 0 and
    standard deviation 0.02, and gains of norms are one. Biases and the output weights of the Markov head and of the
    confidence head are zero, so that the Markov bias and the confidence logits are zero before training. Each tensor is
    drawn from a random stream of its own. So drafts of the same seed with different Markov heads are equal in all
    tensors that both have.

    Raises `CheckpointError` for settings that do not fit together.
    """
    config = compact_config(settings, dims, target_id=target_id)
    key = jax.random.key(seed)
    sources = {
        name: _InitialTensor(name=name, shape=shape, key=jax.random.fold_in(key, index))
        for index, (name, shape) in enumerate(tensor_shapes(config).items())
    }
    return load_module(
        lambda: CompactDraft(config, dtype=dtype), compact_recipes(config), sources, file="a fresh draft"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _InitialTensor:
    """The initial value of one tensor, computed when it is read."""

    name: str
    shape: tuple[int, ...]
    key: jax.Array
    dtype: str = "float32"

    def read(self) -> np.ndarray:
        if self.name.rsplit(".", 1)[-1] in _ONES or self.name in _ONES:
            return np.ones(self.shape, np.float32)
        if self.name in _ZEROS:
            return np.zeros(self.shape, np.float32)
        return np.asarray(0.02 * jax.random.normal(self.key, self.shape, jnp.float32))
