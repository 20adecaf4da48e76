"""Reads a safetensors file as lazy tensors, and writes one. The header is checked before anything is allocated.

The safetensors library makes most of these checks too, but its messages name neither the file nor the field. Its reader
maps the file into memory. Mapped pages count as resident memory of this process while a tensor is in use, and the
process crashes if another one truncates the file. So this module reads bytes instead.
"""

from __future__ import annotations

import dataclasses
import errno
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from dspark_jax.speculators_common.errors import CheckpointError, shown
from dspark_jax.speculators_common.files.json_file import parse_json_object

_MAX_HEADER_BYTES = 100_000_000  # the limit of the format
_METADATA = {"format": "pt"}  # what other libraries look for before they read such a file
_LENGTH_BYTES = 8  # the header's length comes first, as a little-endian integer
_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),  # the library finds it by name, which works only after ml_dtypes was imported
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SafetensorsTensor:
    """A tensor in a safetensors file. `dtype` is the numpy name, or `bfloat16`; `offset` is in bytes from the start."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    offset: int

    def read(self) -> np.ndarray:
        """The tensor as a new array of `shape` and `dtype`; no other copy is made.

        Raises `CheckpointError` if the file is gone or was truncated.
        """
        array = np.empty(self.shape, np.dtype(self.dtype))
        where = f"{self.file}: tensor {self.name}: cannot be read"
        try:
            with open(self.file, "rb") as stream:
                stream.seek(self.offset)
                count = stream.readinto(array.reshape(-1).view(np.uint8).data)
        except OSError as error:
            raise CheckpointError(f"{where}: {error.strerror}") from error
        if count != array.nbytes:
            raise CheckpointError(
                f"{where}: found {count} bytes, allowed {array.nbytes} (the file was truncated since it was opened)"
            )
        return array


def open_safetensors(file: Path) -> dict[str, SafetensorsTensor]:
    """All tensors of `file` by name, in the order of the header. The data of the tensors is not read.

    Raises `CheckpointError` for a truncated or inconsistent file, and for dtypes that are not read here (packed 4-bit,
    float8).
    """
    header, data_start, data_bytes = _read_header(file)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise CheckpointError(f"{file}: __metadata__: found {_short(metadata)}, allowed an object of texts")
    tensors = {name: _described(file, name, entry, data_bytes) for name, entry in header.items()}
    _check_layout(file, tensors, data_bytes)
    return {
        name: SafetensorsTensor(
            name=name,
            shape=tensor.shape,
            dtype=_DTYPES[tensor.dtype].name,
            file=str(file),
            offset=data_start + tensor.begin,
        )
        for name, tensor in tensors.items()
    }


def write_safetensors(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write `tensors` to `file`, in their own dtypes. Raises `OSError` where the system cannot, as for a full disk."""
    try:
        save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, file, metadata=_METADATA)
    except SafetensorError as error:  # also what the system says, as text only
        raise OSError(errno.EIO, str(error), str(file)) from error


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype with the name `name`, `bfloat16` included."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _HeaderEntry:
    shape: tuple[int, ...]
    dtype: str
    begin: int
    end: int


def _read_header(file: Path) -> tuple[dict[str, Any], int, int]:
    """The parsed header, the offset of the data in bytes, and the number of bytes of data."""
    try:
        with file.open("rb") as stream:
            size = file.stat().st_size
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            room = size - _LENGTH_BYTES
            if room < 0 or length > min(room, _MAX_HEADER_BYTES):
                limit = f"allowed at most {max(0, min(room, _MAX_HEADER_BYTES))} in a file of {size} bytes"
                raise CheckpointError(
                    f"{file}: header length: found {length}, {limit} (truncated, or not a safetensors file)"
                )
            data = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    start = _LENGTH_BYTES + length
    return parse_json_object(data, f"{file}: header"), start, size - start


def _described(file: Path, name: str, entry: Any, data_bytes: int) -> _HeaderEntry:
    """One header entry, checked against the size of the data."""
    where = f"{file}: tensor {name}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"{where}: header entry: found {_short(entry)}, allowed an object with dtype, shape and data_offsets"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise CheckpointError(f"{where}: dtype: found {_short(dtype)}, allowed {', '.join(_DTYPES)}")
    if not _are_sizes(shape):
        raise CheckpointError(f"{where}: shape: found {_short(shape)}, allowed a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets: found {_short(offsets)}, allowed [begin, end]")
    begin, end = offsets
    if end > data_bytes:
        raise CheckpointError(
            f"{where}: data_offsets: found {_short(offsets)}, allowed at most {data_bytes} (the file is truncated)"
        )
    needed = math.prod(shape) * _DTYPES[dtype].itemsize
    if end - begin != needed:
        raise CheckpointError(
            f"{where}: data_offsets: found {end - begin} bytes, allowed {_short(needed)} for {dtype} of shape "
            f"{_short(shape)}"
        )
    return _HeaderEntry(shape=tuple(shape), dtype=dtype, begin=begin, end=end)


def _check_layout(file: Path, tensors: dict[str, _HeaderEntry], data_bytes: int) -> None:
    """Check that every byte of the data belongs to exactly one tensor."""
    position = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != position:
            fault = "overlaps the tensor before it" if tensor.begin < position else "leaves unused bytes before it"
            raise CheckpointError(
                f"{file}: tensor {name}: data_offsets: found begin {tensor.begin}, allowed {position} ({fault})"
            )
        position = tensor.end
    if position != data_bytes:
        raise CheckpointError(
            f"{file}: data: found {data_bytes} bytes, allowed {position} (bytes that belong to no tensor)"
        )


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _short(value: Any) -> str:
    text = shown(value)
    return text if len(text) <= 80 else text[:77] + "..."
