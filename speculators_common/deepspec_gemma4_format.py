"""`config.json` of a DeepSpec draft with Gemma4 layers -> `DraftConfig`.

A copy of the target's text config with the draft's values written over it. Many fields of the target stay behind without meaning for the draft: its
sliding window, its per-kind rotary settings other than `full_attention`, its key/value sharing between layers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark_jax.speculators_common.deepspec_format import read_deepspec_heads, read_deepspec_layout, read_deepspec_taps
from dspark_jax.speculators_common.detect import only_architecture, require_family
from dspark_jax.speculators_common.draft_config import Choice, DraftConfig, DraftOverrides, LayerMask
from dspark_jax.speculators_common.draft_fields import (
    FULL,
    HARMLESS_FIELDS,
    MAX_LAYERS,
    ROTARY_FLAG,
    Geometry,
    read_layer_types,
    read_mask_token,
    refuse_unsupported,
)
from dspark_jax.speculators_common.errors import field_error
from dspark_jax.speculators_common.fields import Fields
from dspark_jax.speculators_common.rope_config import RopeConfig
from dspark_jax.speculators_common.rope_fields import parse_rope, stated_partial_rotary_factor

_ACTIVATION = "gelu_pytorch_tanh"
_OF_THE_TARGET = (
    "moe_intermediate_size",
    "num_experts",
    "sliding_window",
    "target_model_type",
    "target_text_model_type",
    "top_k_experts",
    "use_bidirectional_attention",
    "vocab_size_per_layer_input",
)


def from_deepspec_gemma4(raw: Mapping[str, Any], file: Path | str, overrides: DraftOverrides | None = None) -> DraftConfig:
    """The draft that `raw`, the content of `file`, describes: anchor-first, every layer full and bidirectional, the whole vocabulary.

    Every layer has heads of `global_head_dim`. Raises `CheckpointError` for everything that the format does not allow.
    """
    require_family(raw, file, "deepspec_gemma4")
    top = Fields(raw, file)
    nested = top.section("transformer_layer_config")
    block = top.joined(top.section("dspark_config"), top.section("dflash_config"))
    network = top.joined(nested)
    network.string("hidden_activation")
    network.ignore(*_OF_THE_TARGET)
    refuse_unsupported(network, supported=_ACTIVATION)
    _refuse_other_layers(network)
    k_eq_v = network.boolean("attention_k_eq_v")
    geometry = _geometry(top, nested, k_eq_v=k_eq_v)
    num_layers = len(read_layer_types(network, geometry["num_hidden_layers"], choices=(FULL,)))
    block_size = block.integer("block_size", minimum=1)
    sample_from_anchor, layout_choices = read_deepspec_layout(block, block_size, overrides)
    rope, rope_choices = _rope(network, geometry["head_dim"], overrides)
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
        style="gemma4",
        k_eq_v=k_eq_v,
        embedding_scale=math.sqrt(geometry["hidden_size"]),
        final_logit_softcapping=network.number("final_logit_softcapping", above=0, default=None),
        architecture=only_architecture(top),
        family="deepspec_gemma4",
        source=str(file),
        num_target_layers=num_target_layers,
        choices=(*layout_choices, *rope_choices),
        unknown_fields=top.unread(HARMLESS_FIELDS),
    )


def _geometry(top: Fields, nested: Fields, *, k_eq_v: bool) -> Geometry:
    """The sizes. Which key/value head count applies depends on `k_eq_v`; the other one, and `head_dim`, are the target's."""
    both = top.joined(nested)
    num_layers, vocab = (next((place for place in (nested, top) if place.has(name)), both) for name in ("num_hidden_layers", "vocab_size"))
    top.ignore("num_hidden_layers", "vocab_size")
    both.ignore("head_dim", "num_key_value_heads", "num_global_key_value_heads")
    kv_name = "num_global_key_value_heads" if k_eq_v else "num_key_value_heads"
    heads, kv_heads = (both.integer(name, minimum=1) for name in ("num_attention_heads", kv_name))
    if heads % kv_heads:
        raise both.error(kv_name, kv_heads, f"a divisor of num_attention_heads {heads}")
    hidden_size = both.integer("hidden_size", minimum=1)
    return Geometry(
        hidden_size=hidden_size,
        intermediate_size=both.integer("intermediate_size", minimum=1),
        num_hidden_layers=num_layers.integer("num_hidden_layers", minimum=1, maximum=MAX_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=both.integer("global_head_dim", minimum=1),
        rms_norm_eps=both.number("rms_norm_eps", above=0),
        attention_bias=both.boolean("attention_bias", default=False),
        vocab_size=vocab.integer("vocab_size", minimum=1),
        target_hidden_size=top.integer("target_hidden_size", minimum=1, default=hidden_size),
        max_position_embeddings=both.integer("max_position_embeddings", minimum=1),
    )


def _refuse_other_layers(network: Fields) -> None:
    """Parts that some Gemma4 targets have and no draft of this format."""
    if network.boolean("tie_word_embeddings", default=False):
        raise network.error("tie_word_embeddings", True, "false: the format stores embedding and head as two tensors")
    if network.boolean("enable_moe_block", default=False):
        raise network.error("enable_moe_block", True, "false: drafts with expert layers are not supported")
    per_layer = network.integer("hidden_size_per_layer_input", default=0)
    if per_layer != 0:
        raise network.error("hidden_size_per_layer_input", per_layer, "0: drafts with inputs per layer are not supported")
    shared = network.integer("num_kv_shared_layers", default=0)
    if network.boolean("use_double_wide_mlp", default=False) and shared != 0:
        raise network.error(
            "use_double_wide_mlp", True, f"false, or true beside num_kv_shared_layers 0 (found {shared}): wide layers are not supported"
        )


def _rope(network: Fields, head_dim: int, overrides: DraftOverrides | None) -> tuple[RopeConfig, tuple[Choice, ...]]:
    """The `full_attention` settings. Here the share of the head that turns is the draft's own, as it was trained."""
    stated = stated_partial_rotary_factor(network, (FULL,))
    parse = functools.partial(parse_rope, network, head_dim=head_dim, layer_types=(FULL,), kinds=("default", "proportional"))
    override = None if overrides is None else overrides.partial_rotary_factor
    if override is None:
        return parse(), ()
    if not 0 < override <= 1:
        raise field_error(network.file, ROTARY_FLAG, override, "a number > 0 and <= 1")
    reason = f"stated by the user; the file says {'nothing' if stated is None else stated}"
    choice = Choice(name="partial_rotary_factor", value=str(override), reason=reason, flag=ROTARY_FLAG)
    return parse(partial_rotary_factor=override), (choice,)
