"""Small checkpoint directories for tests, valid and broken."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from dspark_jax.pipelines.checkpoints.checkpoint import open_checkpoint
from dspark_jax.speculators_common.errors import CheckpointError

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 4}


def write_config(directory: Path, config: object = CONFIG) -> None:
    (directory / "config.json").write_text(json.dumps(config))


def arrays() -> dict[str, np.ndarray]:
    values = np.arange(12, dtype=np.float32).reshape(3, 4) / 7
    return {
        "a.weight": values,
        "b.weight": values.astype(ml_dtypes.bfloat16),
        "c.weight": values.astype(np.float16),
        "ids": np.arange(5, dtype=np.int64) - 2,
        "mask": np.array([True, False, True]),
        "scalar": np.array(2.5, np.float32),
        "empty": np.zeros((0, 4), np.float32),
    }


def write_index(directory: Path, weight_map: object) -> None:
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    )


def write_raw(directory: Path, header: dict[str, Any] | bytes, data: bytes = b"", length: int | None = None) -> None:
    """A safetensors file with any header, honest or not."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(
        struct.pack("<Q", len(encoded) if length is None else length) + encoded + data
    )


def entry(begin: int, end: int, shape: list[Any] | None = None, dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory)
    message = str(caught.value)
    assert message.startswith(str(directory))
    assert "\n" not in message
    return message


def assert_holds(tensors: Any, expected: dict[str, np.ndarray]) -> None:
    assert set(tensors) == set(expected)
    for name, array in expected.items():
        assert tensors[name].shape == array.shape
        assert tensors[name].dtype == array.dtype.name
        read = tensors[name].read()
        assert read.dtype == array.dtype
        np.testing.assert_array_equal(read, array)


def single_file(directory: Path) -> Path:
    """A valid checkpoint in one file."""
    write_config(directory)
    save_file(arrays(), directory / "model.safetensors")
    return directory


def two_shards(directory: Path) -> Path:
    """A valid checkpoint in two shards."""
    write_config(directory)
    stored = arrays()
    names = sorted(stored)
    shards = {"model-1.safetensors": names[:3], "model-2.safetensors": names[3:]}
    for shard, held in shards.items():
        save_file({name: stored[name] for name in held}, directory / shard)
    write_index(directory, {name: shard for shard, held in shards.items() for name in held})
    return directory
