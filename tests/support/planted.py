"""Pairs of a target and a draft whose acceptance is known in advance, made of the real modules.

The greedy next token of the target is `successor(previous token)`, computed by its real layers: embedding rows are unit
vectors, and each layer adds a constant in its own coordinate. The drafts use the same coordinates: with a Markov head
that has the successor (PD-1), with a head that is wrong (PD-2) or needed (PD-3) in slot 0, and with an attention layer
that finds marks in the context. If one `BAD` row is visible every draft is wrong (PD-5), and if no `GOOD` row is
visible every draft is wrong (PD-6).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import numpy as np
from jax.typing import DTypeLike

from dspark_jax.speculators_common.formats.draft_config import DraftOverrides
from tests.support.tiny_checkpoints import TinyCheckpoint, blank_tensors, draft_config, load_pair, target_config

BAD, GOOD, MASK, VOCAB = 0, 25, 26, 27  # tokens outside the cycle; 0 is also what pads a prompt chunk
CYCLE = tuple(int(token) for token in np.random.default_rng(0).permutation(np.arange(1, 25)))
NUMBER = {token: number for number, token in enumerate(CYCLE)}
BLOCK = 5
HIDDEN, HEADS, HEAD_DIM = 40, 2, 16
_LAYER_MARK, _DRIVE, _BAD_MARK, _GOOD_MARK = 27, 30, 31, 32  # coordinates beyond the tokens'
_SLOW = HEAD_DIM // 2 - 1  # first element of the slowest rotary pair
_UNIT = np.sqrt(HIDDEN)  # size of a normed vector with one coordinate

Layout = Literal["anchor-first", "fill-in"]


def successor(token: int) -> int:
    """The next token of the target after `token`: the next one of the cycle; tokens outside the cycle lead to its first
    token.
    """
    return CYCLE[(NUMBER.get(token, -1) + 1) % len(CYCLE)]


def cycle_from(number: int, length: int) -> tuple[int, ...]:
    """`length` tokens of the cycle, the first one with this number."""
    return tuple(CYCLE[(number + step) % len(CYCLE)] for step in range(length))


def planted_target(next_token: Callable[[int], int] = successor, *, num_layers: int = 1) -> TinyCheckpoint:
    """A Llama-style target whose greedy next token is `next_token(previous)`."""
    config = target_config(
        "LlamaForCausalLM",
        hidden_size=HIDDEN,
        intermediate_size=8,
        num_hidden_layers=num_layers,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB,
        mlp_bias=True,
    )
    tensors = blank_tensors(config)
    tensors["model.embed_tokens.weight"] = np.eye(VOCAB, HIDDEN, dtype=np.float32)
    for token in range(VOCAB):
        tensors["lm_head.weight"][next_token(token), token] = 1
    for layer in range(num_layers):
        tensors[f"model.layers.{layer}.mlp.down_proj.bias"][_LAYER_MARK + layer] = 0.5
    return TinyCheckpoint(config=config, tensors=tensors)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftPlant:
    """A draft to be planted; the defaults are PD-1.

    `markov[t]` is what the Markov head proposes after `t`. `slot0` is what an own head adds for the anchor, far above
    the Markov bias. `bad` and `good` say which coordinates of the tap mark a context row; `needs_good` gives every slot
    a wrong answer that only a `GOOD` row takes away.
    """

    layout: Layout = "anchor-first"
    markov: Callable[[int], int] = successor
    slot0: Callable[[int], int] | None = None
    bad: Collection[int] = ()
    good: Collection[int] = ()
    needs_good: bool = False
    feature_scale: float = 1.0  # of the marks in `fc`; the norm after it takes any sane scale away
    tap: int = 0
    window: int | None = None
    draft_ids: tuple[int, ...] | None = None  # a pruned draft vocabulary
    padded_ids: int = 0  # surplus ids of the draft vocabulary, which the head prefers

    def checkpoint(self) -> TinyCheckpoint:
        """The speculators-format files of this draft."""
        config = draft_config(
            network={
                "hidden_size": HIDDEN,
                "intermediate_size": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": HEADS,
                "num_key_value_heads": 1,
                "head_dim": HEAD_DIM,
                "vocab_size": VOCAB,
                "attention_bias": True,
                "layer_types": ["full_attention" if self.window is None else "sliding_attention"],
                "sliding_window": self.window or 1,
            },
            draft_vocab_size=VOCAB + self.padded_ids if self.draft_ids is None else len(self.draft_ids),
            aux_hidden_state_layer_ids=[self.tap],
            block_size=BLOCK,
            mask_token_id=MASK,
            markov_rank=VOCAB,
            enable_confidence_head=False,
            confidence_head_with_markov=False,
            sample_from_anchor=self.layout == "anchor-first",
        )
        maps = () if self.draft_ids is None else ("d2t",)
        tensors = blank_tensors(config, "embed_tokens.weight", "lm_head.weight", *maps)
        if self.draft_ids is not None:
            tensors["d2t"] = np.asarray(self.draft_ids, np.int64) - np.arange(len(self.draft_ids))
        self._plant_heads(tensors)
        self._plant_attention(tensors)
        return TinyCheckpoint(config=config, tensors=tensors)

    def _plant_heads(self, tensors: Mapping[str, np.ndarray]) -> None:
        rows = {token: row for row, token in enumerate(self.draft_ids or range(VOCAB))}
        head, w2 = tensors["lm_head.weight"], tensors["markov_head.markov_w2.weight"]
        tensors["embed_tokens.weight"][:] = np.eye(VOCAB, HIDDEN)
        tensors["markov_head.markov_w1.weight"][:] = np.eye(VOCAB)
        head[VOCAB:] = 100
        for token in range(VOCAB):
            if self.markov(token) in rows:
                w2[rows[self.markov(token)], token] = 1
            if self.slot0 is not None and token != MASK:
                head[rows[self.slot0(token)], token] = 10
        if self.needs_good:
            tensors["embed_tokens.weight"][:, _DRIVE] = 1
        if BAD in rows:
            head[rows[BAD], _DRIVE] = 10

    def _plant_attention(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Every slot has its query along the slowest rotary direction. Marked rows have a key there; the keys of other
        rows and of the block are zero.
        """
        for coordinate in self.bad:
            tensors["fc.weight"][_BAD_MARK, coordinate] = self.feature_scale
        for coordinate in self.good:
            tensors["fc.weight"][_GOOD_MARK, coordinate] = self.feature_scale
        layer = "layers.0.self_attn"
        for head in range(HEADS):
            tensors[f"{layer}.q_proj.bias"][head * HEAD_DIM + _SLOW] = 1
        tensors[f"{layer}.k_norm.weight"][:] = 10
        for element, coordinate in enumerate((_BAD_MARK, _GOOD_MARK)):
            tensors[f"{layer}.k_proj.weight"][_SLOW, coordinate] = 1
            tensors[f"{layer}.v_proj.weight"][element, coordinate] = 1 / _UNIT
        tensors[f"{layer}.o_proj.weight"][_DRIVE, :2] = 50, -1


def layer_mark(layer: int) -> int:
    """The coordinate that target layer `layer` adds to: it is in tap `layer + 1` and later ones."""
    return _LAYER_MARK + layer


def planted_pair(
    plant: DraftPlant,
    *,
    forced: Layout | None = None,
    target: TinyCheckpoint | None = None,
    dtype: DTypeLike = np.float32,
) -> tuple[Any, Any]:
    """(target, draft) as modules; `forced` overrides the layout that the files of the draft state."""
    overrides = None if forced is None else DraftOverrides(sample_from_anchor=forced == "anchor-first")
    return load_pair(target or planted_target(), plant.checkpoint(), overrides=overrides, dtype=dtype)


def spoiled(numbers: Collection[int], wrong: int | None = None) -> Callable[[int], int]:
    """A Markov table that is wrong after the cycle tokens of these numbers: it says `wrong`, by default the token after
    next.
    """

    def markov(token: int) -> int:
        right = successor(token)
        if NUMBER.get(token) not in numbers:
            return right
        return successor(right) if wrong is None else wrong

    return markov


def scripted_rounds(
    markov: Callable[[int], int], first_anchor: int, num_speculative_tokens: int, num_rounds: int
) -> list[int]:
    """Accepted drafts per round of a draft whose Markov head is `markov`."""
    accepted, anchor = [], first_anchor
    for _ in range(num_rounds):
        count = 0
        while count < num_speculative_tokens and markov(anchor) == successor(anchor):
            anchor = successor(anchor)
            count += 1
        accepted.append(count)
        anchor = successor(anchor)
    return accepted
