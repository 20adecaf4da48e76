"""The one normalised draft config. Every checkpoint format is parsed into it; nothing downstream knows the format.

Field meanings follow the paper (arXiv 2607.05147) and `docs/formats.md`; axis letters in brackets.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from dspark_jax.speculators_common.rope_config import RopeConfig

MarkovHeadType = Literal["none", "vanilla", "gated", "rnn"]
WindowOrigin = Literal["anchor", "query"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerMask:
    """What the block slots of one draft layer may see.

    `window`: context positions kept, `None` = all. `causal`: slot k sees the block slots `<= k` only; otherwise the block is bidirectional.
    """

    window: int | None = None
    causal: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A decision that the checkpoint leaves open: what was chosen, why, and the command-line flag that overrides it."""

    name: str
    value: str
    reason: str
    flag: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftOverrides:
    """What a user states about a draft instead of the checkpoint; `None` leaves the decision to the files."""

    sample_from_anchor: bool | None = None
    partial_rotary_factor: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """One draft, whatever format it came from.

    Fields that only say where the config came from take no part in equality: the flat and the nested description of the same weights are equal.
    """

    hidden_size: int  # d
    intermediate_size: int  # F
    num_hidden_layers: int  # nl
    num_attention_heads: int  # N
    num_key_value_heads: int  # K
    head_dim: int  # hd
    rms_norm_eps: float
    attention_bias: bool
    vocab_size: int  # V, target ids
    draft_vocab_size: int  # Vd, draft ids
    target_hidden_size: int  # H
    taps: tuple[int, ...]  # residual stream after j target layers, 0 = embedding output; m = len(taps)
    block_size: int  # W
    sample_from_anchor: bool  # anchor-first if true, fill-in otherwise
    mask_token_id: int
    markov_rank: int  # r
    markov_head_type: MarkovHeadType
    enable_confidence_head: bool
    confidence_head_with_markov: bool
    layers: tuple[LayerMask, ...]
    window_origin: WindowOrigin = "anchor"
    rope: RopeConfig
    max_position_embeddings: int

    architecture: str = dataclasses.field(compare=False)
    family: str = dataclasses.field(compare=False)
    source: str = dataclasses.field(default="", compare=False)  # the config file, for messages
    num_target_layers: int | None = dataclasses.field(default=None, compare=False)
    target_name: str | None = dataclasses.field(default=None, compare=False)
    target_architectures: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    choices: tuple[Choice, ...] = dataclasses.field(default=(), compare=False)
    unknown_fields: tuple[str, ...] = dataclasses.field(default=(), compare=False)  # stated in the file, of no known meaning, without influence

    @property
    def num_drafts(self) -> int:
        """D: drafts that one block can give."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def num_taps(self) -> int:
        """m: tapped layers, concatenated in the order of `taps`."""
        return len(self.taps)

    @property
    def num_draft_ids(self) -> int:
        """Draft ids that have a target id; a head padded beyond the target's vocabulary has surplus rows that are dropped on load."""
        return min(self.draft_vocab_size, self.vocab_size)

    @property
    def is_pruned(self) -> bool:
        """Whether the draft proposes from a subset of the target vocabulary, through a d2t table."""
        return self.draft_vocab_size < self.vocab_size
