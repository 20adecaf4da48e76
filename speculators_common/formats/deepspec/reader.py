"""`config.json` of a DeepSpec draft -> `DraftConfig`: what its two kinds of layers share, and the draft with Qwen3
layers.

The file is the target's config with the draft's values written over it, so some values of the target stay behind
without meaning for the draft.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark_jax.speculators_common.formats.choice import Choice
from dspark_jax.speculators_common.formats.deepspec.names import QWEN3_ARCHITECTURE, QWEN3_FAMILY
from dspark_jax.speculators_common.formats.draft_config import DraftConfig, DraftOverrides
from dspark_jax.speculators_common.formats.draft_fields import (
    HARMLESS_FIELDS,
    MARKOV_HEAD_TYPES,
    NEUTRAL_FIELDS,
    Geometry,
    Heads,
    read_fixed_layout,
    read_geometry,
    read_heads,
    read_mask_token,
    read_rope,
    read_taps,
    refuse_unsupported,
    with_usable_length,
)
from dspark_jax.speculators_common.formats.fields import Fields, only_architecture
from dspark_jax.speculators_common.formats.layer_masks import FULL, read_layer_masks
from dspark_jax.speculators_common.formats.rope.config import RopeConfig
from dspark_jax.speculators_common.formats.speculators.names import refuse_speculators
from dspark_jax.speculators_common.formats.unknown_fields import unknown_fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSpecFields:
    """Where the values of a DeepSpec config may lie: `block` has the block's, `network` those of the layers."""

    architecture: str
    top: Fields
    nested: Fields
    block: Fields
    network: Fields


def from_deepspec(raw: Mapping[str, Any], file: Path | str, overrides: DraftOverrides | None = None) -> DraftConfig:
    """The draft that `raw`, the content of `file`, describes: anchor-first, every layer full and bidirectional, the
    whole vocabulary.

    The format has no defaults for its own values. Raises `CheckpointError` for everything that it does not allow.
    """
    fields = deepspec_fields(raw, file, QWEN3_ARCHITECTURE, activation_name="hidden_act", activation="silu")
    geometry = read_geometry(fields.top, fields.nested)
    rope, rope_choices = read_rope(
        fields.network, head_dim=geometry["head_dim"], layer_types=(FULL,), overrides=overrides
    )
    return deepspec_config(fields, geometry, rope, rope_choices, overrides, family=QWEN3_FAMILY)


def deepspec_fields(
    raw: Mapping[str, Any], file: Path | str, architecture: str, *, activation_name: str, activation: str
) -> DeepSpecFields:
    """The locations of a config of this `architecture`; refuses what no draft of the format can have."""
    top = Fields(raw, file)
    only_architecture(top, names=(architecture,))
    refuse_speculators(top, architecture)
    nested = top.section("transformer_layer_config")
    network = top.joined(nested)
    network.string(activation_name)
    network.ignore("sliding_window")
    refuse_unsupported(network, supported=activation)
    if network.boolean("tie_word_embeddings", default=False):
        raise network.error("tie_word_embeddings", True, "false: the format stores embedding and head as two tensors")
    block = top.joined(top.section("dspark_config"), top.section("dflash_config"))
    return DeepSpecFields(architecture=architecture, top=top, nested=nested, block=block, network=network)


def deepspec_config(
    fields: DeepSpecFields,
    geometry: Geometry,
    rope: RopeConfig,
    rope_choices: tuple[Choice, ...],
    overrides: DraftOverrides | None,
    *,
    family: str,
) -> DraftConfig:
    """The record of a draft with these sizes and this rotation, its other values read from `fields`; those of Qwen3
    layers where layers differ.
    """
    top, block = fields.top, fields.block
    block_size = block.integer("block_size", minimum=1)
    sample_from_anchor, layout_choices = read_fixed_layout(block, block_size, overrides, anchor_first=True)
    num_target_layers = top.integer("num_target_layers", minimum=1)
    return DraftConfig(
        **with_usable_length(geometry, rope, top.file),
        draft_vocab_size=geometry["vocab_size"],
        taps=_taps(block, num_target_layers),
        block_size=block_size,
        sample_from_anchor=sample_from_anchor,
        mask_token_id=read_mask_token(block, geometry["vocab_size"]),
        **_heads(block),
        layers=read_layer_masks(block, fields.network, geometry["num_hidden_layers"], layer_types=(FULL,)),
        rope=rope,
        architecture=fields.architecture,
        family=family,
        source=str(top.file),
        num_target_layers=num_target_layers,
        choices=(*layout_choices, *rope_choices),
        unknown_fields=unknown_fields(top, HARMLESS_FIELDS, NEUTRAL_FIELDS),
    )


def _taps(block: Fields, num_target_layers: int) -> tuple[int, ...]:
    """`target_layer_ids`: the output of layer x is the stream after x + 1 layers."""
    return read_taps(
        block,
        "target_layer_ids",
        shift=1,
        num_target_layers=num_target_layers,
        convention="counted as DeepSpec does (-1 = embedding output, x = output of layer x, last layer excluded)",
    )


def _heads(block: Fields) -> Heads:
    """A head type is written only for a positive rank, the confidence input only for an enabled head."""
    rank = block.integer("markov_rank")
    enabled = block.boolean("enable_confidence_head")
    block.ignore("confidence_head_with_markov")
    if rank > 0 and not block.has("markov_head_type"):
        raise block.missing("markov_head_type", f"{', '.join(MARKOV_HEAD_TYPES)}, as markov_rank is {rank}")
    if enabled and not block.has("confidence_head_with_markov"):
        raise block.missing("confidence_head_with_markov", "true or false, as enable_confidence_head is true")
    return read_heads(
        block,
        rank=rank,
        head_type=block.string("markov_head_type", default="vanilla"),
        enabled=enabled,
        with_markov=block.boolean("confidence_head_with_markov") if enabled else False,
    )
