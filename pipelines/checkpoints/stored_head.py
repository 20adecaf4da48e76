"""Handles targets that state `tie_word_embeddings` but also store a head.

The stored head may be a copy of the embedding or a different tensor. Libraries differ in which one they use. Here a
stored head that differs from the embedding is used, because it was trained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from dspark_jax.architectures.registry import SupportedArchitecture
from dspark_jax.pipelines.checkpoint_data import Checkpoint
from dspark_jax.speculators_common.errors import CheckpointError
from dspark_jax.speculators_common.files.safetensors_file import SafetensorsTensor
from dspark_jax.speculators_common.formats.choice import Choice
from dspark_jax.speculators_common.formats.recipes import TensorSource

_PIECE = 1 << 22  # bytes, or elements, that are compared at a time


def with_stored_head(entry: SupportedArchitecture, config: Any, checkpoint: Checkpoint) -> Any:
    """`config`, or an untied copy of it if the checkpoint stores a head that differs from the embedding.

    The copy lists this in `choices`. Tensors are read only if both are stored, and only up to the first difference.
    """
    if entry.kind != "target" or not getattr(config, "tie_word_embeddings", False):
        return config
    names = checkpoint.tensors.keys()
    untied = dataclasses.replace(config, tie_word_embeddings=False)
    tied_table, untied_table = entry.recipes(config, names), entry.recipes(untied, names)
    for path, recipe in untied_table.items():
        head, embedding = tuple(recipe.tensors), tuple(tied_table[path].tensors)
        if head == embedding or not set(head + embedding) <= set(names):
            continue
        pairs = zip(head, embedding, strict=True)
        if not all(holds_the_same(checkpoint.tensors[a], checkpoint.tensors[b]) for a, b in pairs):
            reason = f"tie_word_embeddings is true, but {head[0]} differs from {embedding[0]}"
            choice = Choice(name="lm_head", value="its own", reason=reason, flag="")
            return dataclasses.replace(untied, choices=(*config.choices, choice))
    return config


def holds_the_same(one: TensorSource, other: TensorSource) -> bool:
    """Whether two tensors have the same shape and values. Tensors of the same dtype are compared bit for bit."""
    if tuple(one.shape) != tuple(other.shape):
        return False
    if one.dtype == other.dtype and isinstance(one, SafetensorsTensor) and isinstance(other, SafetensorsTensor):
        return all(a == b for a, b in zip(_pieces(one), _pieces(other), strict=True))
    a, b = one.read(), other.read()
    rows = max(1, _PIECE // max(1, a[:1].size))
    return all(
        np.array_equal(a[start : start + rows].astype(np.float32), b[start : start + rows].astype(np.float32))
        for start in range(0, len(a), rows)
    )


def _pieces(tensor: SafetensorsTensor) -> Iterator[bytes]:
    """The stored bytes of a tensor, in pieces of a few megabytes."""
    left = int(np.prod(tensor.shape, dtype=np.int64)) * np.dtype(tensor.dtype).itemsize
    try:
        with open(tensor.file, "rb") as stream:
            stream.seek(tensor.offset)
            while left:
                piece = stream.read(min(left, _PIECE))
                if not piece:
                    raise CheckpointError(
                        f"{left} bytes are missing (the file was truncated since it was opened)",
                        file=tensor.file,
                        field=f"tensor {tensor.name}",
                    )
                left -= len(piece)
                yield piece
    except OSError as error:
        raise CheckpointError(
            f"cannot be read: {error.strerror}", file=tensor.file, field=f"tensor {tensor.name}"
        ) from error
