"""GGUF headers are read as the library reads them. Numbers that do not fit the file are refused in one line."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from dspark_jax.pipelines.checkpoints.gguf.checkpoint import open_gguf
from dspark_jax.speculators_common.errors import CheckpointError
from dspark_jax.speculators_common.files.gguf_header import read_gguf_header
from tests.support.tiny_gguf import HD, H, K, gguf, model_tensors, patched, refusal, tensor_entry, write_gguf


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", model_tensors())


@pytest.mark.parametrize(
    ("kind", "known_as"),
    [(999, "999"), (gguf.GGMLQuantizationType.Q8_K, "Q8_K"), (gguf.GGMLQuantizationType.I32, "I32")],
)
def test_type_that_cannot_be_dequantised_is_refused(file: Path, kind: int, known_as: str) -> None:
    name = "blk.1.attn_v.weight"
    patched(file, tensor_entry(name, (H, K * HD), 0), tensor_entry(name, (H, K * HD), kind))
    assert refusal(file).endswith(
        f"tensor {name}: type: found '{known_as}', allowed a type that the package gguf can dequantise"
    )


def test_rows_of_part_blocks_are_refused(file: Path) -> None:
    name, q8_0 = "blk.1.ffn_norm.weight", int(gguf.GGMLQuantizationType.Q8_0)
    patched(file, tensor_entry(name, (H,), 0), tensor_entry(name, (H + 1,), q8_0))
    assert refusal(file).endswith(f"tensor {name}: found shape [65], allowed rows of a multiple of 32 (Q8_0)")


def test_huge_tensor_costs_an_error_and_no_memory(file: Path) -> None:
    name = "blk.1.ffn_norm.weight"
    patched(file, tensor_entry(name, (H,), 0), tensor_entry(name, (1 << 60,), 0))
    assert f"tensor {name}: ends at byte" in refusal(file)
    assert "(the file is truncated)" in refusal(file)


def test_repeated_tensor_is_refused(file: Path) -> None:
    patched(
        file, tensor_entry("blk.1.attn_v.weight", (H, K * HD), 0), tensor_entry("blk.0.attn_v.weight", (H, K * HD), 0)
    )
    assert refusal(file).endswith("tensor blk.0.attn_v.weight: appears twice")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "not a GGUF file (it does not start with GGUF)"),
        (b"PK\3\4", "not a GGUF file (it does not start with GGUF)"),
        (b"GGUF", "version: found 4 bytes at 4, allowed what fits into 4 bytes"),
        (b"GGUF" + struct.pack("<I", 1), "version: found 1, allowed 2 or 3, little-endian"),
        (b"GGUF" + struct.pack(">I", 3), "version: found 50331648, allowed 2 or 3, little-endian"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60),
            "field count: found 1152921504606846976 entries, allowed what fits into 24 bytes",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0),
            "tensor count: found 1152921504606846976 entries, allowed what fits into 24 bytes",
        ),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**60) + b"abcd",
            "a field name: found 1152921504606846976 bytes at 32",
        ),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 8, 2**60),
            "a: found 1152921504606846976 entries",
        ),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 4, 2**60),
            "a: found 4611686018427387904 bytes",
        ),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 9, 2),
            "a: found value type 9, allowed a number, a string or",
        ),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"\xff" + bytes(20), "a field name: invalid UTF-8"),
    ],
)
def test_malformed_header_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    assert expected in refusal(tmp_path / "bad.gguf")


def test_missing_file_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "absent.gguf").endswith("absent.gguf: no such file")


def test_every_truncation_is_refused(file: Path) -> None:
    content = file.read_bytes()
    # The file ends with padding behind the last tensor, which may be missing.
    end = max(info.offset + 4 * int(np.prod(info.shape)) for info in read_gguf_header(file).tensors.values())
    for length in [*range(0, 2000, 13), *range(2000, end, 4999), end - 1]:
        file.write_bytes(content[:length])
        refusal(file)


def test_random_damage_is_an_error_or_harmless(file: Path) -> None:
    content, random = file.read_bytes(), np.random.default_rng(11)
    refused = 0
    for position in random.integers(0, 2500, 300):
        damaged = bytearray(content)
        damaged[position] ^= random.integers(1, 256)
        file.write_bytes(damaged)
        try:
            open_gguf(file)
        except CheckpointError:
            refused += 1
    assert 150 < refused < 300


def test_header_agrees_with_the_library(file: Path) -> None:
    header, reader = read_gguf_header(file), gguf.GGUFReader(file)
    assert dict(header.metadata) == {
        key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")
    }
    assert {name: (info.shape, info.type_id, info.offset) for name, info in header.tensors.items()} == {
        tensor.name: (tuple(tensor.shape.tolist()[::-1]), int(tensor.tensor_type), tensor.data_offset)
        for tensor in reader.tensors
    }
