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

    `window` is the number of visible context positions; `None` means all. With `causal`, slot k sees the block slots
    `<= k` only; otherwise every slot sees every slot.
    """

    window: int | None = None
    causal: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotThresholds:
    """One confidence threshold per slot. A proposal ends before the first slot whose confidence is below its threshold.

    Slot 0 is always proposed, whatever its confidence.
    """

    values: tuple[float, ...]  # probabilities, one per slot
    # How the thresholds were fitted: the precision to reach (the share of drafts above the threshold that the target
    # accepts), and the number of samples. None: not stated.
    target: float | None = dataclasses.field(default=None, compare=False)
    samples: int | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftOverrides:
    """Values of a draft that the user states; they replace those of the checkpoint. `None`: the checkpoint decides."""

    sample_from_anchor: bool | None = None
    partial_rotary_factor: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """The config of one draft, the same for all formats.

    Equality compares the network only, not the fields that describe the file. So two files in different formats that
    describe the same weights give equal configs.
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
    taps: tuple[Tap, ...]  # in the order in which they are concatenated
    block_size: int  # W
    sample_from_anchor: bool  # anchor-first if true, fill-in otherwise
    mask_token_id: int | None  # None: every masked slot has a learned row of its own
    markov_rank: int  # r
    markov_head_type: MarkovHeadType
    enable_confidence_head: bool
    confidence_head_with_markov: bool
    layers: tuple[LayerMask, ...]
    window_origin: WindowOrigin = "anchor"  # the position from which windows are counted backwards
    rope: RopeConfig  # with rotary_dim 0 there is no rotation, and the context K/V do not depend on positions
    max_position_embeddings: int | None  # in tokens; None: no limit
    style: DraftStyle = "qwen3"  # the network of a layer
    k_eq_v: bool = False  # the values are the output of the key projection, before key norm and rotation
    embedding_scale: float = 1.0  # multiplies the embeddings of the block inputs
    output_multiplier: float = 1.0  # multiplies the base logits, before the soft-cap
    final_logit_softcapping: float | None = None  # soft-cap of the base logits, before the Markov bias is added
    # Confidence thresholds stored with the draft. None: only the threshold of the request shortens a proposal.
    thresholds: SlotThresholds | None = None

    architecture: str = dataclasses.field(compare=False)
    family: str = dataclasses.field(compare=False)
    source: str = dataclasses.field(default="", compare=False)  # path of the config file, for messages
    num_target_layers: int | None = dataclasses.field(default=None, compare=False)
    # k: the number of drafts per round that the file recommends. None: not stated.
    stated_drafts: int | None = dataclasses.field(default=None, compare=False)
    target_name: str | None = dataclasses.field(default=None, compare=False)
    target_architectures: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    choices: tuple[Choice, ...] = dataclasses.field(default=(), compare=False)
    # False: files of the format hold no embedding and no head. The draft uses those of the target.
    stores_tables: bool = dataclasses.field(default=True, compare=False)
    # True: the tap (number of target layers + 1) means FINAL, see `for_target`.
    taps_reach_final: bool = dataclasses.field(default=False, compare=False)
    # Dotted paths of fields that the file states and that are not known here. They change nothing.
    unknown_fields: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    @property
    def max_drafts(self) -> int:
        """D: the number of drafts that one block proposes, at most."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    def for_target(self, num_layers: int) -> DraftConfig:
        """This config, completed with the number of layers of the target.

        A file with `taps_reach_final` states the tap after the final norm as the number `num_layers + 1`. It becomes
        `FINAL` here, because the file does not state the number of target layers.
        """
        if not self.taps_reach_final or self.num_target_layers is not None:
            return self
        taps = tuple(FINAL if tap == num_layers + 1 else tap for tap in self.taps)
        return dataclasses.replace(self, taps=taps, num_target_layers=num_layers)

    @property
    def num_taps(self) -> int:
        """m: the number of taps."""
        return len(self.taps)

    @property
    def table_width(self) -> int:
        """Width of an embedding row and of the head's input: d, or H for a compact draft, which uses the target's."""
        return self.target_hidden_size if self.style == "compact" else self.hidden_size

    @property
    def num_draft_ids(self) -> int:
        """The number of draft ids that stand for a target id, at most V.

        A draft head may be padded beyond V. Its rows from V on are dropped on load.
        """
        return min(self.draft_vocab_size, self.vocab_size)

    @property
    def is_pruned(self) -> bool:
        """Whether the draft vocabulary is a subset of the target's, mapped to target ids by `d2t`."""
        return self.draft_vocab_size < self.vocab_size
