"""The tensors of a GGUF file, dequantised to float32 when they are read."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import numpy as np

from dspark_jax.speculators_common.errors import CheckpointError, DSparkError, install_hint

# Elements per dequantised piece. Temporaries of this size stay in the CPU cache: the demo model takes 0.45 s, but 1.3 s
# in pieces of 16 rows or of 2**20 elements.
_PIECE = 1 << 17


@dataclasses.dataclass(frozen=True, kw_only=True)
class GGUFTensor:
    """A tensor of a GGUF file, dequantised when it is read.

    If `rotary_heads` is not 0, the tensor has that many heads whose rotary pairs are stored interleaved; reading
    reorders their rows.
    """

    name: str
    shape: tuple[int, ...]
    file: str
    offset: int
    size_bytes: int
    quantisation: Any  # gguf.GGMLQuantizationType
    rotary_heads: int = 0
    dtype: str = "float32"

    def read(self) -> np.ndarray:
        """The tensor as float32 of `shape`, rows in the order of Hugging Face. Raises `CheckpointError`."""
        try:
            stored = np.memmap(self.file, np.uint8, mode="r", offset=self.offset, shape=(self.size_bytes,))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot be read: {error}", file=self.file, field=f"tensor {self.name}") from error
        array = dequantise(stored.view(np.ndarray), self.quantisation).reshape(self.shape)
        return half_split_rows(array, self.rotary_heads) if self.rotary_heads else array


def dequantise(stored: np.ndarray, quantisation: Any) -> np.ndarray:
    """The float32 values, flat, of `stored`, the bytes of complete blocks.

    Equal bit for bit to `gguf.quants.dequantize` on all of `stored` at once, because blocks are independent.
    """
    gguf = import_gguf()
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[quantisation]
    values = np.empty(stored.size // block_bytes * block_elements, np.float32)
    blocks_per_piece = max(1, _PIECE // block_elements)
    for first in range(0, stored.size // block_bytes, blocks_per_piece):
        piece = stored[first * block_bytes : (first + blocks_per_piece) * block_bytes]
        start = first * block_elements
        values[start : start + piece.size // block_bytes * block_elements] = gguf.quants.dequantize(
            piece[None], quantisation
        ).reshape(-1)
    return values


def half_split_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of `weight`, `[heads * hd, H]`.

    GGUF stores the two rows of a rotary pair side by side. In the result they are rows i and i + hd/2 of their head.
    """
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def import_gguf() -> ModuleType:
    """The package `gguf`, an extra. Raises `DSparkError` without it."""
    try:
        import gguf
    except ImportError as error:
        raise DSparkError(f"reading .gguf files needs the package gguf: {install_hint('gguf', 'demo')}") from error
    return gguf
