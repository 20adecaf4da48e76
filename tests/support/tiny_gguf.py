"""A tiny llama model as a GGUF file, written with the `gguf` package; test modules that import this are skipped where
it is missing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_jax.pipelines.checkpoints.gguf.checkpoint import open_gguf
from dspark_jax.speculators_common.errors import CheckpointError

gguf = pytest.importorskip("gguf", reason="needs the package gguf: pip install -e '.[demo]'")

H, N, K, HD, F, V, LAYERS = 64, 4, 2, 16, 96, 40, 2
METADATA: dict[str, Any] = {
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": H,
    "llama.feed_forward_length": F,
    "llama.attention.head_count": N,
    "llama.attention.head_count_kv": K,
    "llama.rope.freq_base": 100000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": V,
    "llama.rope.dimension_count": HD,
    "tokenizer.ggml.tokens": [f"t{index}" for index in range(V - 1)] + ["<|im_end|>"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
LAYER_SHAPES = {
    "attn_norm": (H,),
    "attn_q": (N * HD, H),
    "attn_k": (K * HD, H),
    "attn_v": (K * HD, H),
    "attn_output": (H, N * HD),
    "ffn_norm": (H,),
    "ffn_gate": (F, H),
    "ffn_up": (F, H),
    "ffn_down": (H, F),
}
HUGGING_FACE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def model_tensors(*, head: bool = False) -> dict[str, np.ndarray]:
    """GGUF name -> float32 values with the rows in Hugging Face order."""
    random = np.random.default_rng(3)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (V, H), "output_norm.weight": (H,)}
    shapes |= {f"blk.{layer}.{name}.weight": shape for layer in range(LAYERS) for name, shape in LAYER_SHAPES.items()}
    if head:
        shapes["output.weight"] = (V, H)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def hugging_face_name(name: str) -> str:
    if name.startswith("blk."):
        _, layer, part, _ = name.split(".")
        return f"model.layers.{layer}.{HUGGING_FACE[part]}.weight"
    return {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }[name]


def rotary_source_rows(heads: int) -> list[int]:
    """Row of the Hugging Face matrix that GGUF stores in each row: the two members of a rotary pair are neighbours
    there.
    """
    return [head * HD + pair + half * HD // 2 for head in range(heads) for pair in range(HD // 2) for half in (0, 1)]


def stored_rows(name: str, values: np.ndarray) -> np.ndarray:
    heads = N if ".attn_q." in name else K if ".attn_k." in name else 0
    return values[rotary_source_rows(heads)] if len(values) == heads * HD else values


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    metadata: dict[str, Any] = METADATA,
    architecture: str = "llama",
    types: Callable[[str], Any] = lambda name: gguf.GGMLQuantizationType.F32,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        add[type(value)](key, value)
    for name, values in tensors.items():
        stored = np.ascontiguousarray(stored_rows(name, values))
        writer.add_tensor(name, gguf.quants.quantize(stored, types(name)), raw_dtype=types(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refusal(path: Path) -> str:
    """The message with which `open_gguf` refuses `path`: one line that starts with the file."""
    with pytest.raises(CheckpointError) as caught:
        open_gguf(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


def patched(path: Path, old: bytes, new: bytes) -> Path:
    content = path.read_bytes()
    assert content.count(old) == 1
    assert len(old) == len(new)
    path.write_bytes(content.replace(old, new))
    return path


def tensor_entry(name: str, axes: tuple[int, ...], kind: int) -> bytes:
    """The table entry of a tensor, up to its offset."""
    encoded = name.encode()
    return struct.pack("<Q", len(encoded)) + encoded + struct.pack(f"<I{len(axes)}QI", len(axes), *axes, kind)
