"""Rotary position embedding as data, shared by targets and drafts. The arithmetic is in
`architectures/nn/rotary.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn", "proportional"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """How positions become rotation angles; element `i` is paired with `i + rotary_dim / 2`.

    `rotary_dim` is the number of leading head elements that rotate (`head_dim` unless the rotation is partial).
    `factor` divides the frequencies (`linear` and `proportional`: all of them; `llama3`: the slow ones, blended between
    the two frequency factors of the original context length; `yarn`: the slow ones, blended between the pairs that turn
    `beta_slow` and `beta_fast` times over the original context length). A `linear` rotation may state the original
    length too; it changes no frequency.
    """

    theta: float
    rotary_dim: int
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # yarn: scales queries and keys, through cosine and sine
    # proportional: the first `rotating_pairs` pairs rotate, with the frequencies of a whole head; the others do not.
    rotating_pairs: int = 0
