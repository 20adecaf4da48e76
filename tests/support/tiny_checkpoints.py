"""Tiny models as a user has them: `config.json` and `model.safetensors` in a directory, loaded by the package's own
loaders.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from dspark_jax.architectures.registry import retrieve
from dspark_jax.pipelines.checkpoints.loading import load_draft, load_target
from dspark_jax.speculators_common.formats.draft_config import DraftOverrides

Tensors = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyCheckpoint:
    """The content of a checkpoint directory."""

    config: Mapping[str, Any]
    tensors: Mapping[str, np.ndarray]

    def write(self, directory: Path) -> Path:
        """Write both files into `directory`, which is made."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        save_file(
            {name: np.ascontiguousarray(tensor) for name, tensor in self.tensors.items()},
            directory / "model.safetensors",
        )
        return directory


def load_pair(
    target: TinyCheckpoint,
    draft: TinyCheckpoint | None,
    *,
    overrides: DraftOverrides | None = None,
    dtype: DTypeLike = jnp.float32,
) -> tuple[Any, Any]:
    """(target module, draft module or `None`), through files."""
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_target(target.write(Path(folder) / "target"), dtype)
        if draft is None:
            return loaded.module, None
        return loaded.module, load_draft(draft.write(Path(folder) / "draft"), loaded, dtype, overrides).module


def target_config(architecture: str, **fields: Any) -> dict[str, Any]:
    """`config.json` of a dense target with small defaults."""
    return {
        "architectures": [architecture],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        **fields,
    }


def draft_config(*, network: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """`config.json` of a speculators-format draft; `network` goes into `transformer_layer_config`."""
    nested = {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        **network,
    }
    return {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "draft_vocab_size": nested["vocab_size"],
        "transformer_layer_config": nested,
        **fields,
    }


def tensor_shapes(config: Mapping[str, Any], *optional: str) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the architecture reads; `optional` names those that a file may leave out."""
    entry = retrieve(config["architectures"][0])
    recipes = entry.recipes(entry.parse_config(config, "config.json", None), optional)
    return {name: shape for recipe in recipes.values() for name, shape in recipe.tensors.items()}


def blank_tensors(config: Mapping[str, Any], *optional: str) -> Tensors:
    """Norms one, everything else zero: a model whose layers pass their input through."""
    return {name: _blank(name, shape) for name, shape in tensor_shapes(config, *optional).items()}


def random_tensors(config: Mapping[str, Any], seed: int, *optional: str) -> Tensors:
    """Weights that make every part count: kernels of gain 1.5, embeddings of unit size, norms around one, biases that
    are not zero.
    """
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in sorted(tensor_shapes(config, *optional).items()):
        noise = rng.normal(size=shape).astype(np.float32)
        if len(shape) == 2:
            tensors[name] = noise if "embed_tokens" in name else noise * np.float32(1.5 / np.sqrt(shape[1]))
        else:
            tensors[name] = (1 if name.endswith("norm.weight") else 0) + np.float32(0.2) * noise
    return tensors


def _blank(name: str, shape: tuple[int, ...]) -> np.ndarray:
    is_norm = name.endswith("norm.weight")
    return np.full(shape, 1 if is_norm else 0, np.float32)
