"""Writing the `config.json` of a DeepSpec draft with Gemma4 layers. The inverse of `from_deepspec_gemma4`."""

from __future__ import annotations

import math
from typing import Any

from dspark_jax.speculators_common.formats.deepspec.names import GEMMA4_ARCHITECTURE
from dspark_jax.speculators_common.formats.deepspec.writer import block_faults, block_fields
from dspark_jax.speculators_common.formats.draft_config import DraftConfig
from dspark_jax.speculators_common.formats.draft_writer import Fault, common_faults, refuse_unwritable
from dspark_jax.speculators_common.formats.layer_masks import FULL
from dspark_jax.speculators_common.formats.rope.writer import rope_parameters


def to_deepspec_gemma4(config: DraftConfig, *, dtype: str | None = None) -> dict[str, Any]:
    """The fields of the `config.json`, all at the top level. `from_deepspec_gemma4` gives an equal config back.

    `dtype` is the name of the stored tensors' type; `None` leaves the field out. A draft has no sliding layers, so the
    head size and the number of key/value heads of sliding layers are written as those of full layers. Raises one
    `CheckpointError` that lists every value of `config` that cannot be written.
    """
    refuse_unwritable(config, "DeepSpec Gemma4", _faults(config))
    fields = {
        "architectures": [GEMMA4_ARCHITECTURE],
        "model_type": "gemma4_text",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "num_global_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "global_head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "attention_k_eq_v": config.k_eq_v,
        "final_logit_softcapping": config.final_logit_softcapping,
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": {FULL: rope_parameters(config.rope, config.head_dim)},
        "tie_word_embeddings": False,
        "layer_types": [FULL] * config.num_hidden_layers,
        **block_fields(config),
    }
    return fields if dtype is None else {**fields, "dtype": dtype}


def _faults(config: DraftConfig) -> list[Fault]:
    if config.style != "gemma4":
        return [
            (
                "architectures",
                config.architecture,
                f"a draft of Gemma4 layers; this one has layers of the {config.style} style",
            )
        ]
    faults = [*common_faults(config), *block_faults(config)]
    scale = math.sqrt(config.hidden_size)
    for field, found, fixed in (
        ("embedding_scale", config.embedding_scale, scale),
        ("output_multiplier", config.output_multiplier, 1.0),
    ):
        if found != fixed:
            faults.append((field, found, f"{fixed}, as the format has no such field"))
    if config.rope.kind not in ("default", "proportional"):
        faults.append(("rope_type", config.rope.kind, "default or proportional"))
    return faults
