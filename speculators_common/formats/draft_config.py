"""The normalised draft config. The reader of every checkpoint format produces it; no other code knows the format.

Field meanings follow the paper (arXiv 2607.05147) and `docs/formats.md`; axis letters in brackets.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from dspark_jax.speculators_common.formats.choice import Choice
from dspark_jax.speculators_common.formats.rope.config import RopeConfig

MarkovHeadType = Literal["none", "vanilla", "gated", "rnn", "tanh_rnn"]
WindowOrigin = Literal["anchor", "query"]
DraftStyle = Literal["qwen3", "gemma4", "compact"]
Tap = int | Literal["final"]
FINAL: Literal["final"] = "final"  # the tap after the target's final norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerMask:
    """What the block slots of one draft layer may see.

    `window`: the number of context positions that are visible, `None` = all. `causal`: slot k sees the block slots
    `<= k` only; otherwise the block is bidirectional.
    """

    window: int | None = None
    causal: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotThresholds:
    """Confidence of each slot below which a proposal ends before it; slot 0 is never cut. `target` and `samples` say
    how they were found.
    """

    values: tuple[float, ...]
    target: float | None = dataclasses.field(default=None, compare=False)
    samples: int | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftOverrides:
    """Values of a draft that the user states; they replace those of the checkpoint. `None`: the checkpoint decides."""

    sample_from_anchor: bool | None = None
    partial_rotary_factor: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """One draft, whatever format it came from.

    Fields that only say where the config came from take no part in equality: the flat and the nested description of the
    same weights are equal.
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
    # Residual stream after j target layers; 0 = embedding output, FINAL = after the final norm; m = len(taps).
    taps: tuple[Tap, ...]
    block_size: int  # W
    sample_from_anchor: bool  # anchor-first if true, fill-in otherwise
    mask_token_id: int | None  # None: every masked slot has a learned row of its own
    markov_rank: int  # r
    markov_head_type: MarkovHeadType
    enable_confidence_head: bool
    confidence_head_with_markov: bool
    layers: tuple[LayerMask, ...]
    window_origin: WindowOrigin = "anchor"
    rope: RopeConfig  # a rotary_dim of 0: no rotation, and the context carries no positions
    max_position_embeddings: int | None  # None: no bound
    style: DraftStyle = "qwen3"  # the network of a layer
    k_eq_v: bool = False  # values are the key projection's output, before key norm and rotation
    embedding_scale: float = 1.0  # of the raw rows of anchor and masks
    output_multiplier: float = 1.0  # of the base logits, before the soft-cap
    final_logit_softcapping: float | None = None  # of the base logits, before the Markov bias
    # Confidence thresholds stored with the draft; None: the request alone decides the length of a proposal.
    thresholds: SlotThresholds | None = None

    architecture: str = dataclasses.field(compare=False)
    family: str = dataclasses.field(compare=False)
    source: str = dataclasses.field(default="", compare=False)  # the config file, for messages
    num_target_layers: int | None = dataclasses.field(default=None, compare=False)
    stated_drafts: int | None = dataclasses.field(default=None, compare=False)  # k that the file states
    target_name: str | None = dataclasses.field(default=None, compare=False)
    target_architectures: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    choices: tuple[Choice, ...] = dataclasses.field(default=(), compare=False)
    # False: the format never stores an embedding or a head; both are the target's.
    stores_tables: bool = dataclasses.field(default=True, compare=False)
    # True: a tap that equals the target's depth + 1 means FINAL, see `for_target`.
    taps_reach_final: bool = dataclasses.field(default=False, compare=False)
    # Fields that the file states and no reader knows; they have no influence.
    unknown_fields: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    @property
    def max_drafts(self) -> int:
        """D: the most drafts that one block can propose."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    def for_target(self, num_layers: int) -> DraftConfig:
        """This draft beside a target of `num_layers` layers.

        Where the file counts the state after the final norm as one more layer, its tap becomes `FINAL`: only now is the
        depth known.
        """
        if not self.taps_reach_final or self.num_target_layers is not None:
            return self
        taps = tuple(FINAL if tap == num_layers + 1 else tap for tap in self.taps)
        return dataclasses.replace(self, taps=taps, num_target_layers=num_layers)

    @property
    def num_taps(self) -> int:
        """m: tapped layers, concatenated in the order of `taps`."""
        return len(self.taps)

    @property
    def table_width(self) -> int:
        """Width of the embedding rows and head inputs that the draft works with: its own, or the target's if it
        projects from and to that.
        """
        return self.target_hidden_size if self.style == "compact" else self.hidden_size

    @property
    def num_draft_ids(self) -> int:
        """Draft ids that have a target id; a head padded beyond the target's vocabulary has surplus rows that are
        dropped on load.
        """
        return min(self.draft_vocab_size, self.vocab_size)

    @property
    def is_pruned(self) -> bool:
        """Whether the draft proposes from a subset of the target vocabulary, through a d2t table."""
        return self.draft_vocab_size < self.vocab_size
