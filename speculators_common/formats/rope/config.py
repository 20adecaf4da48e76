"""The settings of a rotary position embedding, for targets and drafts.

`architectures/nn/rotary.py` computes the angles.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn", "proportional"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """How positions become rotation angles. Element `i` of a head is paired with element `i + rotary_dim / 2`.

    `factor` divides frequencies, depending on the kind:
    * `linear`, `proportional`: all frequencies.
    * `llama3`: the low frequencies. Between `low_freq_factor` and `high_freq_factor` turns over the original context
      length, divided and undivided frequencies are blended.
    * `yarn`: the low frequencies. The blend is between `beta_slow` and `beta_fast` turns.
    """

    theta: float  # base of the frequencies
    rotary_dim: int  # number of leading head elements that rotate; 0: no rotation
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0  # context length before it was extended, in tokens; 0: not stated
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # yarn: multiplies cosine and sine, and so queries and keys
    # proportional: number of leading pairs that rotate. Their frequencies are those of a head that rotates completely.
    rotating_pairs: int = 0
