"""Reading the `config.json` of a DeepSpec draft with Qwen3 layers, and the parts shared with `gemma4_reader`.

DeepSpec copies the target's config and replaces the values of the draft. So the file also holds values of the target
that say nothing about the draft.
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
    """The objects of a DeepSpec config, and which of them are read for which values."""

    architecture: str
    top: Fields  # the top level of the file
    nested: Fields  # `transformer_layer_config`
    block: Fields  # fields of the block: top level, `dspark_config`, `dflash_config`
    network: Fields  # fields of the layers: top level, `transformer_layer_config`


def from_deepspec(raw: Mapping[str, Any], file: Path | str, overrides: DraftOverrides | None = None) -> DraftConfig:
    """Read the config of a DeepSpec draft with Qwen3 layers. `raw` is the content of `file`.

    Such a draft is anchor-first and uses all ids of the target vocabulary. Its layers are full and bidirectional unless
    `use_swa` or `causal` states otherwise. Fields of the block have no defaults. `overrides` are values stated by the
    user. Raises `CheckpointError` for a missing field and for a value that the format does not allow.
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
    """Check the fields that are fixed in the format, and return the objects of the config.

    `activation` is the only allowed value of the field `activation_name`. Raises `CheckpointError` for another
    architecture and for another fixed value.
    """
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
    """The `DraftConfig` with these sizes and this rotation; the other values are read from `fields`.

    The layer style is that of Qwen3. The reader of Gemma4 drafts replaces it. Raises `CheckpointError`.
    """
    top, block = fields.top, fields.block
    block_size = block.integer("block_size", minimum=1)
    sample_from_anchor, layout_choices = read_fixed_layout(block, block_size, overrides, anchor_first=True)
    num_target_layers = top.integer("num_target_layers", minimum=1)
    layers, mask_choices = read_layer_masks(block, fields.network, geometry["num_hidden_layers"], layer_types=(FULL,))
    return DraftConfig(
        **with_usable_length(geometry, rope, top.file),
        draft_vocab_size=geometry["vocab_size"],
        taps=_taps(block, num_target_layers),
        block_size=block_size,
        sample_from_anchor=sample_from_anchor,
        mask_token_id=read_mask_token(block, geometry["vocab_size"]),
        **_heads(block),
        layers=layers,
        rope=rope,
        architecture=fields.architecture,
        family=family,
        source=str(top.file),
        num_target_layers=num_target_layers,
        choices=(*layout_choices, *rope_choices, *mask_choices),
        unknown_fields=unknown_fields(top, HARMLESS_FIELDS, NEUTRAL_FIELDS),
    )


def _taps(block: Fields, num_target_layers: int) -> tuple[int, ...]:
    """Read `target_layer_ids`. Id x of DeepSpec is the output of layer x, which is tap x + 1."""
    return read_taps(
        block,
        "target_layer_ids",
        shift=1,
        num_target_layers=num_target_layers,
        convention="counted as DeepSpec does (-1 = embedding output, x = output of layer x, last layer excluded)",
    )


def _heads(block: Fields) -> Heads:
    """Read both heads. `markov_head_type` and `confidence_head_with_markov` are mandatory if the draft has the head."""
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
