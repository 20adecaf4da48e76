"""Hugging Face directories: tensors arrive as they were stored, and every broken directory is refused with one line
that says why.
"""

from __future__ import annotations

import json
import pickle
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from dspark_jax.pipelines.checkpoints.checkpoint import open_checkpoint, open_target
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


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A valid checkpoint in one file."""
    write_config(tmp_path)
    save_file(arrays(), tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A valid checkpoint in two shards."""
    write_config(tmp_path)
    stored = arrays()
    names = sorted(stored)
    shards = {"model-1.safetensors": names[:3], "model-2.safetensors": names[3:]}
    for shard, held in shards.items():
        save_file({name: stored[name] for name in held}, tmp_path / shard)
    write_index(tmp_path, {name: shard for shard, held in shards.items() for name in held})
    return tmp_path


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


@pytest.mark.parametrize(
    ("header", "data", "expected"),
    [
        (
            {"t": entry(0, 9)},
            b"12345678",
            "tensor t: data_offsets: found [0, 9], allowed at most 8 (the file is truncated)",
        ),
        ({"t": entry(0, 10**18, [10**18])}, b"12345678", "allowed at most 8 (the file is truncated)"),
        (
            {"t": entry(0, 8, [3], "F32")},
            b"12345678",
            "tensor t: data_offsets: found 8 bytes, allowed 12 for F32 of shape [3]",
        ),
        ({"t": entry(0, 8, [10**30], "F32")}, b"12345678", "tensor t: data_offsets: found 8 bytes, allowed 4000000"),
        ({"t": entry(0, 8, [-8])}, b"12345678", "tensor t: shape: found [-8], allowed a list of sizes"),
        ({"t": entry(0, 8, [8.0])}, b"12345678", "tensor t: shape: found [8.0], allowed a list of sizes"),
        ({"t": entry(0, 8, [8, True])}, b"12345678", "tensor t: shape: found [8, True], allowed a list of sizes"),
        ({"t": entry(8, 0, [8])}, b"12345678", "tensor t: data_offsets: found [8, 0], allowed [begin, end]"),
        (
            {"t": {**entry(0, 8), "data_offsets": [8]}},
            b"12345678",
            "tensor t: data_offsets: found [8], allowed [begin, end]",
        ),
        ({"t": entry(0, 8, [8], "F8_E4M3")}, b"12345678", "tensor t: dtype: found 'F8_E4M3', allowed F64, F32"),
        ({"t": entry(0, 8, [8], None)}, b"12345678", "tensor t: dtype: found None, allowed F64, F32"),
        ({"t": 3}, b"", "tensor t: header entry: found 3, allowed an object with dtype, shape and data_offsets"),
        (
            {"t": {"dtype": "U8", "shape": [1]}},
            b"1",
            "tensor t: header entry: found {'dtype': 'U8', 'shape': [1]}, allowed an object with",
        ),
        (
            {"t": entry(0, 5), "u": entry(4, 8)},
            b"12345678",
            "tensor u: data_offsets: found begin 4, allowed 5 (overlaps the tensor before it)",
        ),
        (
            {"t": entry(0, 3), "u": entry(4, 8)},
            b"12345678",
            "tensor u: data_offsets: found begin 4, allowed 3 (leaves unused bytes before it)",
        ),
        ({"t": entry(0, 7)}, b"12345678", "data: found 8 bytes, allowed 7 (bytes that belong to no tensor)"),
        (
            b'{"t": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "t": {}}',
            b"1",
            "header: invalid JSON: key 't' appears twice",
        ),
        (b'{"t": ', b"", "header: invalid JSON"),
        (b"[]", b"", "header: found a JSON list, allowed an object"),
        (b"[" * 100_000, b"", "header: invalid JSON: nested too deeply"),
        (b'{"t": ' + b"9" * 10_000 + b"}", b"", "header: invalid JSON: Exceeds the limit"),
        ({"__metadata__": {"format": 3}}, b"", "__metadata__: found {'format': 3}, allowed an object of texts"),
        ({"__metadata__": []}, b"", "__metadata__: found [], allowed an object of texts"),
    ],
)
def test_lying_header_is_refused(directory: Path, header: dict[str, Any] | bytes, data: bytes, expected: str) -> None:
    write_raw(directory, header, data)
    message = refusal(directory)
    assert "model.safetensors" in message
    assert expected in message


def test_the_raw_writer_of_these_tests_can_write_a_valid_file(directory: Path) -> None:
    write_raw(
        directory, {"__metadata__": {"format": "pt"}, "u": entry(4, 8), "t": entry(0, 4, [1], "F32")}, b"\0\0\x80?1234"
    )
    assert_holds(
        open_checkpoint(directory).tensors, {"t": np.ones(1, np.float32), "u": np.frombuffer(b"1234", np.uint8)}
    )


@pytest.mark.parametrize("length", [9, 10**9, 2**63, 2**64 - 1])
def test_huge_header_length_costs_an_error_and_no_memory(directory: Path, length: int) -> None:
    write_raw(directory, b"{}", b"123456", length=length)
    tracemalloc.start()
    message = refusal(directory)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert f"header length: found {length}, allowed at most 8 in a file of 16 bytes" in message
    assert peak < 1 << 20


@pytest.mark.parametrize("content", [b"", b"\0\0\0"])
def test_file_shorter_than_the_length_field_is_refused(directory: Path, content: bytes) -> None:
    (directory / "model.safetensors").write_bytes(content)
    assert "header length: found 0, allowed at most 0 in a file of" in refusal(directory)


@pytest.mark.parametrize("kept", [0.5, 0.999])
def test_truncated_file_is_refused(directory: Path, kept: float) -> None:
    content = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(content[: int(len(content) * kept)])
    assert "truncated" in refusal(directory)


@pytest.mark.parametrize(
    "shard", ["/etc/x.safetensors", "../x.safetensors", "a/../../x", "C:\\x", "..\\x", "\\x", "", "a\0b"]
)
def test_shard_outside_the_directory_is_refused(sharded: Path, shard: str) -> None:
    write_index(sharded, {"a.weight": shard})
    assert refusal(sharded).endswith(
        f"index.json: weight_map: found {shard!r}, allowed a file inside the checkpoint directory"
    )


@pytest.mark.parametrize("weight_map", [None, {}, [], {"a": 3}])
def test_malformed_weight_map_is_refused(sharded: Path, weight_map: object) -> None:
    write_index(sharded, weight_map)
    assert "weight_map: missing or malformed, allowed an object of tensor names and file names" in refusal(sharded)


def test_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-2.safetensors").unlink()
    assert refusal(sharded).endswith("index.json: shard model-2.safetensors: missing")


def test_index_that_names_absent_tensors_is_refused(sharded: Path) -> None:
    weight_map = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    write_index(sharded, {**weight_map, "more.weight": "model-1.safetensors"})
    assert refusal(sharded).endswith("index.json: tensor more.weight: not in model-1.safetensors")


def test_shard_that_holds_unlisted_tensors_is_refused(sharded: Path) -> None:
    weight_map = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    del weight_map["ids"]
    write_index(sharded, weight_map)
    assert "tensor ids: in model-2.safetensors, but weight_map says nothing" in refusal(sharded)


def test_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    save_file(
        {name: array for name, array in arrays().items() if name not in ("a.weight", "b.weight")},
        sharded / "model-2.safetensors",
    )
    assert "tensor c.weight: in model-2.safetensors, but weight_map says model-1.safetensors" in refusal(sharded)


def test_long_fault_lists_are_cut(sharded: Path) -> None:
    weight_map = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    write_index(sharded, weight_map | {f"more.{index}": "model-1.safetensors" for index in range(9)})
    message = refusal(sharded)
    assert message.count("not in model-1.safetensors") == 5
    assert message.endswith("; and 4 more")


def test_single_file_beside_an_index_of_other_files_is_refused(sharded: Path) -> None:
    save_file(arrays(), sharded / "model.safetensors")
    assert refusal(sharded).endswith("found model.safetensors and an index of other files, allowed one of the two")


def test_index_of_one_single_file_is_accepted(directory: Path) -> None:
    write_index(directory, dict.fromkeys(arrays(), "model.safetensors"))
    assert_holds(open_checkpoint(directory).tensors, arrays())
