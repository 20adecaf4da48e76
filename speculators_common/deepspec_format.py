"""`config.json` of a DeepSpec draft with Qwen3 layers -> `DraftConfig`. The target's config with the draft's values written over it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark_jax.speculators_common.detect import only_architecture, require_family
from dspark_jax.speculators_common.draft_config import Choice, DraftConfig, DraftOverrides, LayerMask
from dspark_jax.speculators_common.draft_fields import (
    FULL,
    HARMLESS_FIELDS,
    LAYOUT_FLAG,
    Heads,
    check_block_size,
    read_geometry,
    read_heads,
    read_layer_types,
    read_mask_token,
    read_rope,
    read_taps,
    refuse_unsupported,
)
from dspark_jax.speculators_common.fields import Fields


def from_deepspec(raw: Mapping[str, Any], file: Path | str, overrides: DraftOverrides | None = None) -> DraftConfig:
    """The draft that `raw`, the content of `file`, describes: anchor-first, every layer full and bidirectional, the whole vocabulary.

    The format has no defaults for its own values. Raises `CheckpointError` for everything that it does not allow.
    """
    require_family(raw, file, "deepspec_qwen3")
    top = Fields(raw, file)
    nested = top.section("transformer_layer_config")
    block = top.joined(top.section("dspark_config"), top.section("dflash_config"))
    network = top.joined(nested)
    network.string("hidden_act")
    network.ignore("sliding_window")
    refuse_unsupported(network)
    if network.boolean("tie_word_embeddings", default=False):
        raise network.error("tie_word_embeddings", True, "false: the format stores embedding and head as two tensors")
    geometry = read_geometry(top, nested)
    num_layers = len(read_layer_types(network, geometry["num_hidden_layers"], choices=(FULL,)))
    block_size = block.integer("block_size", minimum=1)
    sample_from_anchor, layout_choices = read_deepspec_layout(block, block_size, overrides)
    rope, rope_choices = read_rope(network, head_dim=geometry["head_dim"], layer_types=(FULL,), overrides=overrides)
    num_target_layers = top.integer("num_target_layers", minimum=1)
    return DraftConfig(
        **geometry,
        draft_vocab_size=geometry["vocab_size"],
        taps=read_deepspec_taps(block, num_target_layers),
        block_size=block_size,
        sample_from_anchor=sample_from_anchor,
        mask_token_id=read_mask_token(block, geometry["vocab_size"]),
        **read_deepspec_heads(block),
        layers=(LayerMask(window=None, causal=False),) * num_layers,
        rope=rope,
        architecture=only_architecture(top),
        family="deepspec_qwen3",
        source=str(file),
        num_target_layers=num_target_layers,
        choices=(*layout_choices, *rope_choices),
        unknown_fields=top.unread(HARMLESS_FIELDS),
    )


def read_deepspec_taps(block: Fields, num_target_layers: int) -> tuple[int, ...]:
    """`target_layer_ids`: the output of layer x is the stream after x + 1 layers."""
    return read_taps(
        block,
        "target_layer_ids",
        shift=1,
        num_target_layers=num_target_layers,
        convention="counted as DeepSpec does (-1 = embedding output, x = output of layer x, last layer excluded)",
    )


def read_deepspec_layout(block: Fields, block_size: int, overrides: DraftOverrides | None) -> tuple[bool, tuple[Choice, ...]]:
    """Anchor-first by the format; only the user can say otherwise."""
    if block.boolean("sample_from_anchor", default=True) is not True:
        raise block.error("sample_from_anchor", False, "true: drafts of this format are anchor-first")
    override = None if overrides is None else overrides.sample_from_anchor
    chosen = True if override is None else override
    check_block_size(block, block_size, chosen)
    if override is None:
        return chosen, ()
    reason = "stated by the user; the format is anchor-first"
    return chosen, (Choice(name="sample_from_anchor", value=str(chosen).lower(), reason=reason, flag=LAYOUT_FLAG),)


def read_deepspec_heads(block: Fields) -> Heads:
    """A head type is written only for a positive rank, the confidence input only for an enabled head."""
    rank = block.integer("markov_rank")
    enabled = block.boolean("enable_confidence_head")
    block.ignore("markov_head_type", "confidence_head_with_markov")
    return read_heads(
        block,
        rank=rank,
        head_type=block.string("markov_head_type") if rank > 0 else block.string("markov_head_type", default="vanilla"),
        enabled=enabled,
        with_markov=block.boolean("confidence_head_with_markov") if enabled else False,
    )
