"""Rotary position embedding as data, shared by targets and drafts. The arithmetic is in `architectures/nn/rotary.py`."""

from __future__ import annotations

import dataclasses
from typing import Literal

RopeKind = Literal["default", "linear", "llama3"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """How positions become rotation angles; element `i` is paired with `i + rotary_dim / 2`.

    `rotary_dim` is the number of leading head elements that rotate (`head_dim` unless the rotation is partial). `factor` divides the frequencies
    (`linear`: all of them; `llama3`: the slow ones, blended between the two frequency factors of the original context length).
    """

    theta: float
    rotary_dim: int
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
