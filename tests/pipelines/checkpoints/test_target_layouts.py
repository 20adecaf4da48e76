"""Targets in the layouts of other writers give the same parameters as the usual layout: fused experts, tied files that
store either table or both, configs without an architecture name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from dspark_jax.pipelines.api import load
from dspark_jax.pipelines.checkpoints import stored_head
from dspark_jax.pipelines.checkpoints.checkpoint import open_checkpoint
from dspark_jax.pipelines.checkpoints.description import describe
from dspark_jax.pipelines.checkpoints.loading import load_draft, load_target, target_table
from dspark_jax.speculators_common.errors import CheckpointError
from tests.support.text_pair import copied

Tensors = dict[str, np.ndarray]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
MULTIMODAL = "E_targets/gemma4_unified_multimodal_layout"


def rewritten(source: Path, folder: Path, tensors: Tensors | None = None, **config: Any) -> Path:
    """A copy of a checkpoint with other tensors and config fields; `...` removes a field."""
    copied(source, folder)
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({name: x for name, x in raw.items() if x is not ...}))
    return folder


def parameters(folder: Path, dtype: Any = jnp.float32) -> dict[str, bytes]:
    module = load_target(folder, dtype).module
    flat = nnx.to_flat_state(nnx.state(module))
    return {".".join(map(str, path)): np.asarray(variable.get_value()).tobytes() for path, variable in flat}


def fused(tensors: Tensors, layer: int, experts: int) -> Tensors:
    """The tensors with all experts of a layer in two tensors, as newer writers store them."""
    tensors, prefix = dict(tensors), f"model.layers.{layer}.mlp.experts"
    gate, up, down = (
        np.stack([tensors.pop(f"{prefix}.{expert}.{x}_proj.weight") for expert in range(experts)])
        for x in ("gate", "up", "down")
    )
    return {
        **tensors,
        f"{prefix}.gate_up_proj": np.concatenate([gate, up], axis=1),
        f"{prefix}.down_proj": down,
    }


@pytest.mark.parametrize("layers", [(0, 2, 3, 4, 5), (2,)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_fused_experts_are_the_same_parameters(data_dir: Path, tmp_path: Path, layers: tuple[int, ...], dtype) -> None:
    source = data_dir / "E_targets" / "qwen3_moe"
    tensors = load_file(source / "model.safetensors")
    for layer in layers:
        tensors = fused(tensors, layer, 4)
    assert tensors["model.layers.2.mlp.experts.gate_up_proj"].shape == (4, 48, 64)
    assert tensors["model.layers.2.mlp.experts.down_proj"].shape == (4, 64, 24)
    assert parameters(rewritten(source, tmp_path / "fused", tensors), dtype) == parameters(source, dtype)


def test_fused_experts_of_another_shape_or_number_are_refused(data_dir: Path, tmp_path: Path) -> None:
    source = data_dir / "E_targets" / "qwen3_moe"
    tensors = fused(load_file(source / "model.safetensors"), 2, 4)
    name = "model.layers.2.mlp.experts.gate_up_proj"
    tensors[name] = np.ascontiguousarray(tensors[name].swapaxes(1, 2))
    with pytest.raises(CheckpointError) as caught:
        load_target(rewritten(source, tmp_path / "turned", tensors), jnp.float32)
    assert f"tensor {name}: found shape [4, 64, 48], expected [4, 48, 64]" in str(caught.value)


@pytest.mark.parametrize("folder", ["E_targets/qwen3_tied", "E_targets/gemma3_text", MULTIMODAL])
def test_a_tied_file_may_keep_the_head_alone(data_dir: Path, tmp_path: Path, folder: str) -> None:
    source = data_dir / folder
    tensors = load_file(source / "model.safetensors")
    [embedding] = [name for name in tensors if name.endswith("embed_tokens.weight")]
    tensors[HEAD] = tensors.pop(embedding)
    only_head = rewritten(source, tmp_path / "head", tensors)
    assert parameters(only_head) == parameters(source)
    checkpoint = open_checkpoint(only_head)
    draft = describe(data_dir / "C_speculators" / "pruned_anchor_full_vanilla").config
    assert target_table(checkpoint, "embed_tokens.weight", draft).read().tobytes() == tensors[HEAD].tobytes()


@pytest.mark.parametrize("folder", ["E_targets/qwen3_tied", "E_targets/gemma3_text"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_an_equal_copy_of_a_tied_head_stays_tied(data_dir: Path, tmp_path: Path, folder: str, dtype) -> None:
    source = data_dir / folder
    tensors = load_file(source / "model.safetensors")
    tensors[EMBEDDING] = tensors[EMBEDDING].astype(ml_dtypes.bfloat16)
    once = rewritten(source, tmp_path / "once", tensors)
    twice = rewritten(source, tmp_path / "twice", {**tensors, HEAD: tensors[EMBEDDING].astype(dtype)})
    config = load_target(twice, jnp.float32).module.config
    assert (config.tie_word_embeddings, config.choices) == (True, ())
    assert parameters(twice) == parameters(once)


@pytest.mark.parametrize("folder", ["E_targets/qwen3_tied", "E_targets/gemma3_text"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_another_head_than_the_embedding_is_used_though_the_config_says_tied(
    data_dir: Path, tmp_path: Path, folder: str, dtype
) -> None:
    source = data_dir / folder
    tensors = load_file(source / "model.safetensors")
    other = tensors[EMBEDDING].astype(dtype)
    other[-1, -1] += 1  # the last element alone
    both = rewritten(source, tmp_path / "both", {**tensors, HEAD: other})
    untied = rewritten(source, tmp_path / "untied", {**tensors, HEAD: other}, tie_word_embeddings=False)
    assert parameters(both) == parameters(untied) != parameters(source)
    [choice] = [choice for choice in describe(both).choices if choice.name == "lm_head"]
    assert choice.value == "its own"
    assert choice.reason == f"tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}"
    loaded = {choice.name: choice for choice in load(both, dtype="float32", max_seq_len=64).choices}
    assert (loaded["target lm_head"].value, loaded["target lm_head"].reason) == (choice.value, choice.reason)


def test_a_draft_borrows_the_head_that_its_target_uses(data_dir: Path, tmp_path: Path) -> None:
    """Both a whole head and the rows of a pruned one."""
    source = data_dir / "E_targets" / "qwen3_tied"
    tensors = load_file(source / "model.safetensors")
    other = np.ascontiguousarray(tensors[EMBEDDING][::-1])
    target = load_target(rewritten(source, tmp_path / "target", {**tensors, HEAD: other}), jnp.float32)
    hidden = jax.random.normal(jax.random.key(0), (2, 64))
    np.testing.assert_allclose(target.module.lm_head(hidden), np.asarray(hidden) @ other.T, atol=1e-4)
    pruned = data_dir / "C_speculators" / "pruned_anchor_full_vanilla"
    own = load_file(pruned / "model.safetensors")
    own.pop(HEAD, None)
    draft = load_draft(rewritten(pruned, tmp_path / "draft", own), target, jnp.float32)
    assert draft.tables.lm_head == "target_rows"
    ids = np.arange(len(own["d2t"])) + own["d2t"]
    kernel = np.asarray(draft.module.head.kernel[...])
    expected = other[ids]
    assert kernel.tobytes() in (expected.tobytes(), np.ascontiguousarray(expected.T).tobytes())


def test_tables_are_compared_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_head, "_PIECE", 64)
    rows = np.arange(200, dtype=np.float32).reshape(20, 10)
    changed = {name: rows.copy() for name in ("first", "middle", "last")}
    changed["first"][0, 0] = changed["middle"][10, 5] = changed["last"][-1, -1] = -1.0
    wide = rows.astype(np.float64)
    (tmp_path / "config.json").write_text('{"architectures": ["X"]}')
    save_file({"rows": rows, "copy": rows, "wide": wide, **changed}, tmp_path / "model.safetensors")
    tensors = open_checkpoint(tmp_path).tensors
    same = {name for name in tensors if stored_head.holds_the_same(tensors["rows"], tensors[name])}
    assert same == {"rows", "copy", "wide"}


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("E_targets/llama_untied_llama3rope", "LlamaForCausalLM"),
        ("E_targets/qwen3_tied", "Qwen3ForCausalLM"),
        ("E_targets/qwen3_moe", "Qwen3MoeForCausalLM"),
        ("E_targets/gemma3_text", "Gemma3ForCausalLM"),
        ("E_targets/gemma4_text_12b_like", "Gemma4ForCausalLM"),
        (MULTIMODAL, "Gemma4UnifiedForConditionalGeneration"),
    ],
)
@pytest.mark.parametrize("architectures", [None, ...])
def test_a_config_without_architectures_is_what_its_model_type_says(
    data_dir: Path, tmp_path: Path, folder: str, name: str, architectures: Any
) -> None:
    described = describe(rewritten(data_dir / folder, tmp_path / "copy", architectures=architectures))
    assert described.checkpoint.architecture == name
    assert described.config == describe(data_dir / folder).config


@pytest.mark.parametrize("architectures", [None, ...])
def test_a_draft_without_architectures_is_never_taken_for_its_target(
    data_dir: Path, tmp_path: Path, architectures: Any
) -> None:
    draft = data_dir / "C_speculators" / "pruned_anchor_full_vanilla"
    described = describe(rewritten(draft, tmp_path / "named", architectures=architectures))
    assert described.entry.family == "speculators_dspark"
    assert described.config == describe(draft).config
    flat = rewritten(data_dir / "A_deepspec_qwen3" / "vanilla", tmp_path / "flat", architectures=architectures)
    assert json.loads((flat / "config.json").read_text())["model_type"] == "qwen3"
    with pytest.raises(CheckpointError, match=r"architectures: (missing|found None), allowed a list of exactly one"):
        describe(flat)


def test_an_unknown_model_type_does_not_stand_for_an_architecture(data_dir: Path, tmp_path: Path) -> None:
    copy = rewritten(data_dir / "E_targets" / "qwen3_tied", tmp_path / "copy", architectures=None, model_type="novel")
    with pytest.raises(CheckpointError, match="architectures: found None, allowed a list of exactly one"):
        describe(copy)


@pytest.mark.parametrize("section", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("method", ["fp8", "gptq", "awq", "compressed-tensors", "bitsandbytes"])
@pytest.mark.parametrize("folder", ["E_targets/qwen3_tied", MULTIMODAL, "C_speculators/pruned_anchor_full_vanilla"])
def test_quantised_weights_are_refused_by_their_method_before_any_tensor_is_looked_at(
    data_dir: Path, tmp_path: Path, section: str, method: str, folder: str
) -> None:
    stated = {section: {"bits": 4, "quant_method": method}}
    raw = json.loads((data_dir / folder / "config.json").read_text())
    part = next((name for name in ("text_config", "transformer_layer_config") if name in raw), None)
    places: dict[str, Any] = {f"{section}.quant_method": stated}
    if part is not None:
        places[f"{part}.{section}.quant_method"] = {part: raw[part] | stated}
    places[f"llm_config.inner.{section}.quant_method"] = {"llm_config": {"inner": stated}}
    for number, (path, fields) in enumerate(places.items()):
        copy = rewritten(data_dir / folder, tmp_path / str(number), **fields)
        # What the weights are stored as is of no interest: here it is nothing that could be opened.
        (copy / "model.safetensors").write_bytes(b"")
        with pytest.raises(CheckpointError) as caught:
            describe(copy)
        assert str(caught.value).startswith(f"{copy}/config.json: {path}: found {method!r}, allowed no such field")


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        (
            "hf_quant_config.json",
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
            "quantization.quant_algo: found 'FP8', allowed no such field",
        ),
        (
            "hf_quant_config.json",
            {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}},
            "quantization.kv_cache_quant_algo: found 'FP8', allowed no such field",
        ),
        (
            "hf_quant_config.json",
            {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"model.layers.0": {}}}},
            "quantization.quant_algo: found 'MIXED_PRECISION', allowed no such field",
        ),
        (
            "hf_quant_config.json",
            {"quantization": {"bits": 4}},
            "quantization: found {'bits': 4}, allowed no such field",
        ),
        ("hf_quant_config.json", {}, "quantization: found None, allowed a JSON object that states quant_algo"),
        ("hf_quant_config.json", {"quantization": ["FP8"]}, "quantization: found ['FP8'], allowed no such field"),
        (
            "quantize_config.json",
            {"bits": 4, "group_size": 128, "desc_act": False},
            "found the settings of a GPTQ export, allowed no such file: quantised weights are not supported",
        ),
        (
            "quantize_config.json",
            {"bits": 4, "quant_method": "marlin"},
            "quant_method: found 'marlin', allowed no such",
        ),
        (
            "quant_config.json",
            {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"},
            "found the settings of an AWQ export, allowed no such file: quantised weights are not supported",
        ),
        ("quant_config.json", ["awq"], "found a JSON list, allowed an object"),
    ],
)
@pytest.mark.parametrize(
    "folder", ["E_targets/qwen3_tied", "C_speculators/pruned_anchor_full_vanilla", "H_compact/markov"]
)
def test_a_quantisation_in_a_file_of_its_own_is_refused_before_any_tensor_is_looked_at(
    data_dir: Path, tmp_path: Path, file: str, content: Any, expected: str, folder: str
) -> None:
    copy = copied(data_dir / folder, tmp_path / "copy")
    (copy / file).write_text(json.dumps(content))
    (copy / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        describe(copy)
    assert str(caught.value).startswith(f"{copy}/{file}: {expected}")


def test_a_modelopt_export_that_quantises_nothing_is_read(data_dir: Path, tmp_path: Path) -> None:
    copy = copied(data_dir / "E_targets" / "qwen3_tied", tmp_path / "copy")
    stated: dict[str, Any] = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": None, "exclude_modules": []}}
    (copy / "hf_quant_config.json").write_text(json.dumps(stated))
    assert describe(copy).config == describe(data_dir / "E_targets" / "qwen3_tied").config


def test_an_old_compressed_export_without_a_method_is_refused_by_its_format(data_dir: Path, tmp_path: Path) -> None:
    stated = {"config_groups": {"group_0": {}}, "format": "pack-quantized", "quantization_status": "frozen"}
    copy = rewritten(data_dir / "E_targets" / "qwen3_tied", tmp_path / "copy", compression_config=stated)
    with pytest.raises(
        CheckpointError, match=r"config.json: compression_config.format: found 'pack-quantized', allowed"
    ):
        describe(copy)
