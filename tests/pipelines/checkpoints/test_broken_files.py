"""Broken safetensors headers, weight maps and shards are refused with one clear line."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dspark_jax.pipelines.checkpoints.checkpoint import open_checkpoint
from tests.support.checkpoint_directories import (
    arrays,
    assert_holds,
    entry,
    refusal,
    single_file,
    two_shards,
    write_index,
    write_raw,
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return single_file(tmp_path)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return two_shards(tmp_path)


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
            {"t": entry(0, 8, [10**18] * 300)},
            b"12345678",
            "data_offsets: found 8 bytes, allowed int, too deep",
        ),
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


@pytest.mark.parametrize("name", ["model-2.safetensors", "model.safetensors.index.json", "config.json"])
def test_a_link_to_nothing_is_called_that(sharded: Path, name: str) -> None:
    (sharded / name).unlink()
    (sharded / name).symlink_to("/no/such/file")
    assert refusal(sharded).endswith(f"{name}: is a link to /no/such/file, where nothing is")


def test_a_directory_that_is_a_link_to_nothing_is_called_that(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/no/such/directory")
    assert refusal(tmp_path / "link").endswith("link: is a link to /no/such/directory, where nothing is")


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
