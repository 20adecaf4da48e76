"""The memory that loading uses beyond the final arrays."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from dspark_jax.pipelines.checkpoints.loading import load_target
from tests.support.tiny_checkpoints import TinyCheckpoint, target_config, tensor_shapes


def test_weights_are_never_in_host_memory_together(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 512,
    }
    config = target_config("LlamaForCausalLM", **sizes, num_hidden_layers=12)
    tensors = {name: np.zeros(shape, ml_dtypes.bfloat16) for name, shape in tensor_shapes(config).items()}
    TinyCheckpoint(config=config, tensors=tensors).write(tmp_path)
    load_target(tmp_path, "bfloat16")  # what tracing and caches keep is there before anything is counted
    tracemalloc.start()
    try:
        module = load_target(tmp_path, "bfloat16").module
        held, peak = (
            tracemalloc.get_traced_memory()
        )  # numpy's arrays are traced, those of the device are not unless they are numpy's
    finally:
        tracemalloc.stop()
    sizes_in_bytes = [array.nbytes for array in jax.tree.leaves(nnx.state(module))]
    assert sum(sizes_in_bytes) > 60e6
    assert peak - held > max(sizes_in_bytes)  # the largest parameter at least was seen
    assert peak - held < sum(sizes_in_bytes) / 4
