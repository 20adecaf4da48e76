"""Reading the `config.json` of a z-lab DFlash draft.

Such a draft is fill-in and has Qwen3 layers, no Markov head and no confidence head. It uses the embedding and the head
of the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark_jax.speculators_common.formats.choice import default_choices
from dspark_jax.speculators_common.formats.draft_config import DraftConfig, DraftOverrides
from dspark_jax.speculators_common.formats.draft_fields import (
    DEFAULT_THETA,
    HARMLESS_FIELDS,
    NEUTRAL_FIELDS,
    NO_HEADS,
    read_fixed_layout,
    read_geometry,
    read_mask_token,
    read_rope,
    read_taps,
    refuse_unsupported,
    with_usable_length,
)
from dspark_jax.speculators_common.formats.fields import Fields, only_architecture
from dspark_jax.speculators_common.formats.layer_masks import FULL, SLIDING, read_layer_masks
from dspark_jax.speculators_common.formats.speculators.names import refuse_speculators
from dspark_jax.speculators_common.formats.unknown_fields import unknown_fields
from dspark_jax.speculators_common.formats.zlab.names import ARCHITECTURE, FAMILY

_DEFAULTS = {"block_size": 16}


def from_zlab(raw: Mapping[str, Any], file: Path | str, overrides: DraftOverrides | None = None) -> DraftConfig:
    """Read the config of a z-lab DFlash draft. `raw` is the content of `file`.

    Fields of the layers are at the top level. Fields of the block are in `dflash_config` or at the top level. Taps and
    mask token are mandatory, although some readers of the format have defaults for them. `overrides` are values stated
    by the user. Raises `CheckpointError` for a missing field and for a value that the format does not allow.
    """
    top = Fields(raw, file)
    architecture = only_architecture(top, names=(ARCHITECTURE,))
    refuse_speculators(top, architecture)
    nested = top.section("transformer_layer_config")
    block = top.section("dflash_config").joined(top)
    network = top.joined(nested)
    refuse_unsupported(network)
    geometry = read_geometry(top, nested)
    block_size = block.integer("block_size", minimum=1, default=_DEFAULTS["block_size"])
    sample_from_anchor, layout_choices = read_fixed_layout(block, block_size, overrides, anchor_first=False)
    rope, rope_choices = read_rope(
        network,
        head_dim=geometry["head_dim"],
        layer_types=(SLIDING, FULL),
        overrides=overrides,
        default_theta=DEFAULT_THETA,
    )
    num_target_layers = top.integer("num_target_layers", minimum=1, default=None)
    layers, mask_choices = read_layer_masks(block, network, geometry["num_hidden_layers"])
    return DraftConfig(
        **with_usable_length(geometry, rope, file),
        draft_vocab_size=geometry["vocab_size"],
        taps=read_taps(
            block,
            "target_layer_ids",
            shift=1,
            num_target_layers=num_target_layers,
            convention="counted as z-lab does (x = output of layer x, last layer excluded)",
        ),
        block_size=block_size,
        sample_from_anchor=sample_from_anchor,
        mask_token_id=read_mask_token(block, geometry["vocab_size"]),
        **NO_HEADS,
        layers=layers,
        # Without windows the origin has no effect. The default makes the config equal to that of the same draft in the
        # speculators format.
        window_origin="query" if any(layer.window for layer in layers) else "anchor",
        rope=rope,
        embedding_scale=block.number("input_embedding_scale", above=0, default=1.0),
        output_multiplier=block.number("output_multiplier", above=0, default=1.0),
        final_logit_softcapping=block.number("final_logit_softcapping", above=0, default=None),
        architecture=architecture,
        family=FAMILY,
        source=str(file),
        num_target_layers=num_target_layers,
        stores_tables=False,
        choices=(*default_choices(block, _DEFAULTS), *layout_choices, *rope_choices, *mask_choices),
        unknown_fields=unknown_fields(top, HARMLESS_FIELDS, NEUTRAL_FIELDS),
    )
