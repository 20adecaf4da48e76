"""Reads and writes the JSON files of a checkpoint. Reading limits the size, and errors name the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark_jax.speculators_common.errors import CheckpointError

MAX_JSON_BYTES = 100_000_000


def read_json_object(file: Path) -> dict[str, Any]:
    """The JSON object in `file`.

    Raises `CheckpointError` if the file cannot be read, is too large, holds no JSON object or repeats a key.
    """
    try:
        size = file.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{file}: size: found {size} bytes, allowed at most {MAX_JSON_BYTES}")
        data = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    return parse_json_object(data, str(file))


def parse_json_object(data: bytes, file: str) -> dict[str, Any]:
    """The JSON object in `data`. Raises a `CheckpointError` that names `file`."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError as error:
        raise CheckpointError(f"{file}: invalid JSON: nested too deeply") from error
    except ValueError as error:  # bad UTF-8, bad JSON, a number with too many digits, a repeated key
        raise CheckpointError(f"{file}: invalid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: found a JSON {type(value).__name__}, allowed an object")
    return value


def write_json_object(file: Path, content: Mapping[str, Any]) -> None:
    """Write `content` to `file` as indented JSON."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # JSON readers differ in which of two equal keys they keep, so a repeated key is ambiguous.
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} appears twice")
        found[key] = value
    return found
