"""Loading a pair: faults in its tensors are one error that names the files, raised before any weights are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.pipelines.api import load
from dspark_jax.pipelines.checkpoints import loading
from dspark_jax.pipelines.checkpoints.loading import load_target
from dspark_jax.pipelines.text import stop_tokens
from dspark_jax.speculators_common.errors import CheckpointError
from tests.support.text_pair import copied, recorded_pair, with_text

Tensors = dict[str, np.ndarray]


def _in_two_shards(directory: Path, tensors: Tensors) -> None:
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, directory / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def target(data_dir: Path, tmp_path: Path) -> Path:
    return copied(data_dir / "D_loop" / "target", tmp_path / "target")


def test_every_fault_of_a_sharded_checkpoint_is_told_with_its_shard(target: Path) -> None:
    tensors = load_file(target / "model.safetensors")
    names = sorted(tensors)
    mistyped, misshapen = (next(name for name in names[start::2] if "k_proj" in name) for start in (0, 1))
    columns = tensors[misshapen].shape[1]
    missing = "model.norm.weight"
    tensors[mistyped] = tensors[mistyped].astype(np.int32)
    tensors[misshapen] = np.ascontiguousarray(tensors[misshapen][:-1])
    shape = tensors.pop(missing).shape
    tensors["zz.surplus"] = np.zeros(1, np.float32)
    _in_two_shards(target, tensors)
    shard_of = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    with pytest.raises(CheckpointError) as caught:
        load_target(target, "float32")
    rows = tensors[misshapen].shape[0]
    assert str(caught.value) == f"{target}: " + "; ".join(
        [
            f"tensor {missing}: missing, expected shape {list(shape)}",
            f"{shard_of['zz.surplus']}: tensor zz.surplus: unexpected",
            f"{shard_of[misshapen]}: tensor {misshapen}: found shape {[rows, columns]}, expected {[rows + 1, columns]}",
            f"{shard_of[mistyped]}: tensor {mistyped}: found dtype int32, expected a floating-point one",
        ]
    )
    assert {shard_of[mistyped], shard_of[misshapen]} == {"model-1.safetensors", "model-2.safetensors"}


def test_shards_load_as_the_single_file_does(data_dir: Path, target: Path) -> None:
    _in_two_shards(target, load_file(target / "model.safetensors"))
    whole, sharded = (load_target(path, "float32").module for path in (data_dir / "D_loop" / "target", target))
    np.testing.assert_array_equal(whole.head.kernel[...], sharded.head.kernel[...])
    np.testing.assert_array_equal(
        whole.layers[0].attention.qkv.kernel[...], sharded.layers[0].attention.qkv.kernel[...]
    )


def test_a_misshapen_tensor_of_the_draft_is_found_before_the_target_is_read(
    data_dir: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*arguments: object, **options: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(loading, "fill_module", read)
    draft = copied(data_dir / "D_loop" / "draft", tmp_path / "draft")
    tensors = load_file(draft / "model.safetensors")
    save_file({**tensors, "norm.weight": tensors["norm.weight"][:-1]}, draft / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"draft: model\.safetensors: tensor norm\.weight: found shape \[63\], expected \[64\]"
    ):
        load(target, draft)


def test_a_pair_is_opened_once_and_its_stop_tokens_are_looked_up_once(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    looked_up: list[str] = []
    parse = loading.parse_checkpoint

    def counted(checkpoint: loading.Checkpoint, *arguments: object) -> object:
        opened.append(checkpoint.path.name)
        return parse(checkpoint, *arguments)  # type: ignore[arg-type]

    declared = stop_tokens._declared

    def looking(checkpoint: loading.Checkpoint) -> Iterator[tuple[int, str]]:
        looked_up.append(checkpoint.path.name)
        return declared(checkpoint)

    monkeypatch.setattr(loading, "parse_checkpoint", counted)
    monkeypatch.setattr(stop_tokens, "_declared", looking)
    load(data_dir / "D_loop" / "target", data_dir / "D_loop" / "draft", dtype="float32", max_seq_len=64)
    assert (opened, looked_up) == (["target", "draft"], ["target"])


def test_a_chat_template_that_does_not_compile_is_a_choice_of_the_loaded_pair(data_dir: Path, tmp_path: Path) -> None:
    target = with_text(recorded_pair(data_dir), tmp_path, template="{% for %}").target
    choices = {choice.name: choice for choice in load(target, dtype="float32", max_seq_len=64).choices}
    assert (choices["chat_template"].value, choices["chat_template"].flag) == ("cannot be used", "--raw")
    assert choices["chat_template"].reason.startswith(f"{target / 'tokenizer_config.json'}: chat template: Expected")
