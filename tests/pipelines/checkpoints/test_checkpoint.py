"""Hugging Face directories: tensors are read as they are stored, and unusable directories are refused with one clear
line.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dspark_jax.pipelines.checkpoints.checkpoint import open_checkpoint, open_target
from dspark_jax.speculators_common.errors import CheckpointError
from tests.support.checkpoint_directories import (
    CONFIG,
    arrays,
    assert_holds,
    refusal,
    single_file,
    two_shards,
    write_config,
    write_index,
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return single_file(tmp_path)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return two_shards(tmp_path)


def test_single_file_gives_config_and_tensors_as_stored(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    assert checkpoint.config == CONFIG
    assert checkpoint.architecture == "LlamaForCausalLM"
    assert checkpoint.config_file == str(directory / "config.json")
    assert checkpoint.generation_config == {}
    assert checkpoint.bytes_on_disk == (directory / "model.safetensors").stat().st_size
    assert set(checkpoint.tensor_files.values()) == {str(directory / "model.safetensors")}
    assert_holds(checkpoint.tensors, arrays())


def test_shards_give_the_same_tensors_and_say_where_each_lies(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    assert_holds(checkpoint.tensors, arrays())
    assert checkpoint.tensor_files["a.weight"] == str(sharded / "model-1.safetensors")
    assert checkpoint.tensor_files["scalar"] == str(sharded / "model-2.safetensors")
    assert checkpoint.bytes_on_disk == sum(file.stat().st_size for file in sharded.glob("*.safetensors"))


def test_generation_config_is_read_when_there_is_one(directory: Path) -> None:
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert open_checkpoint(directory).generation_config == {"eos_token_id": [2, 0]}


def test_bfloat16_is_read_where_nothing_else_has_been_imported(directory: Path) -> None:
    script = (
        f"from dspark_jax.pipelines.checkpoints.checkpoint import open_target; "
        f"print(open_target({str(directory)!r}).tensors['b.weight'].read().dtype)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "bfloat16\n"


def test_model_prefix_is_left_to_the_weight_tables(directory: Path) -> None:
    save_file({"model.norm.weight": np.ones(2, np.float32)}, directory / "model.safetensors")
    assert list(open_checkpoint(directory).tensors) == ["model.norm.weight"]


def test_open_target_takes_a_directory(directory: Path) -> None:
    assert open_target(directory).config == CONFIG
    assert open_target(str(directory)).config == CONFIG


def test_a_file_that_shrinks_after_it_was_opened_is_named(directory: Path) -> None:
    tensors = open_checkpoint(directory).tensors
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-60])
    with pytest.raises(
        CheckpointError,
        match=r"tensor \w+(\.weight)?: cannot be read: found \d+ bytes, allowed \d+ \(the file was truncated",
    ):
        [tensor.read() for tensor in tensors.values()]
    file.unlink()
    with pytest.raises(CheckpointError, match=r"a\.weight: cannot be read: No such file"):
        tensors["a.weight"].read()


def test_reading_a_tensor_makes_one_copy(directory: Path) -> None:
    size = 8 << 20
    save_file({"large": np.ones(size, np.uint8)}, directory / "model.safetensors")
    tensor = open_checkpoint(directory).tensors["large"]
    tracemalloc.start()
    read = tensor.read()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert read.nbytes == size
    assert size <= peak < 1.5 * size


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda d: (d / "model.safetensors").unlink(),
            "found no model.safetensors and no model.safetensors.index.json",
        ),
        (lambda d: (d / "config.json").unlink(), "config.json: missing beside the weights"),
        (
            lambda d: [(d / name).unlink() for name in ("config.json", "model.safetensors")],
            "found neither config.json nor model.safetensors",
        ),
        (lambda d: (d / "config.json").write_text('{"architectures": ['), "config.json: invalid JSON: Expecting value"),
        (
            lambda d: (d / "config.json").write_bytes(b'{"a": "\xff"}'),
            "config.json: invalid JSON: 'utf-8' codec can't decode",
        ),
        (lambda d: (d / "config.json").write_text("[" * 100_000), "config.json: invalid JSON: nested too deeply"),
        (
            lambda d: (d / "config.json").write_text('{"a": 1, "a": 2}'),
            "config.json: invalid JSON: key 'a' appears twice",
        ),
        (lambda d: write_config(d, [1]), "config.json: found a JSON list, allowed an object"),
        (
            lambda d: write_config(d, {}),
            "config.json: architectures: missing, allowed a list of exactly one architecture name",
        ),
        (
            lambda d: write_config(d, {"architectures": []}),
            "config.json: architectures: found [], allowed a list of exactly one",
        ),
        (
            lambda d: write_config(d, {"architectures": ["A", "B"]}),
            "config.json: architectures: found ['A', 'B'], allowed a list of exactly one",
        ),
        (
            lambda d: write_config(d, {"architectures": "A"}),
            "config.json: architectures: found 'A', allowed a list of exactly one",
        ),
        (
            lambda d: write_config(d, {"architectures": [3]}),
            "config.json: architectures: found [3], allowed a list of exactly one",
        ),
        (
            lambda d: (d / "generation_config.json").write_text("3"),
            "generation_config.json: found a JSON int, allowed an object",
        ),
    ],
)
def test_broken_directory_is_refused(directory: Path, make: Callable[[Path], object], expected: str) -> None:
    make(directory)
    assert expected in refusal(directory)


def test_path_that_is_no_directory_is_refused(directory: Path) -> None:
    assert refusal(directory / "absent").endswith("absent: no such directory")
    assert refusal(directory / "config.json").endswith("config.json: is a file, allowed a directory or a .gguf file")


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (
            "pytorch_model.bin",
            "pytorch_model.bin is refused, because loading a pickle can run code: convert it to safetensors",
        ),
        ("weights.pt", "weights.pt is refused, because loading a pickle can run code: convert it to safetensors"),
        ("model.Q4_1.gguf", "to use model.Q4_1.gguf, name that file instead of the directory"),
        ("adapter.safetensors", "adapter.safetensors is not a name this format uses"),
    ],
)
def test_weights_in_another_form_are_named(directory: Path, file: str, expected: str) -> None:
    (directory / "model.safetensors").unlink()
    (directory / file).write_bytes(b"anything")
    assert refusal(directory).endswith(expected)


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("exploded", "w"))


def test_pickled_weights_are_never_executed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(_Bomb()))
    refusal(directory)
    assert not (directory / "exploded").exists()


def test_index_of_one_single_file_is_accepted(directory: Path) -> None:
    write_index(directory, dict.fromkeys(arrays(), "model.safetensors"))
    assert_holds(open_checkpoint(directory).tensors, arrays())
