"""`config.json` of a z-lab DFlash draft -> `DraftConfig`: Qwen3 layers without heads, fill-in, embedding and head
always the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


def from_zlab(raw: Mapping[str, Any], file: Path | str, overrides: DraftOverrides | None = None) -> DraftConfig:
    """The draft that `raw`, the content of `file`, describes.

    The geometry lies at the top level, the block's values in `dflash_config` or beside it. Taps and mask id have no
    default here, although some readers of the format guess them. Raises `CheckpointError` for everything that the
    format does not allow.
    """
    top = Fields(raw, file)
    architecture = only_architecture(top, names=(ARCHITECTURE,))
    refuse_speculators(top, architecture)
    nested = top.section("transformer_layer_config")
    block = top.section("dflash_config").joined(top)
    network = top.joined(nested)
    refuse_unsupported(network)
    geometry = read_geometry(top, nested)
    block_size = block.integer("block_size", minimum=1, default=16)
    sample_from_anchor, layout_choices = read_fixed_layout(block, block_size, overrides, anchor_first=False)
    rope, rope_choices = read_rope(
        network,
        head_dim=geometry["head_dim"],
        layer_types=(SLIDING, FULL),
        overrides=overrides,
        default_theta=DEFAULT_THETA,
    )
    num_target_layers = top.integer("num_target_layers", minimum=1, default=None)
    layers = read_layer_masks(block, network, geometry["num_hidden_layers"])
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
        # Without windows there is nothing to measure, and the record equals that of the speculators twin.
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
        choices=(*layout_choices, *rope_choices),
        unknown_fields=unknown_fields(top, HARMLESS_FIELDS, NEUTRAL_FIELDS),
    )
