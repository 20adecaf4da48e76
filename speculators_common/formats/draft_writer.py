"""What the writers of draft formats have in common: the fields of Qwen3 layers and the refusal of other drafts.

A writer turns a `DraftConfig` into the fields of a format. The reader of that format gives an equal `DraftConfig` back.
A draft that the format cannot describe is refused in one error that lists all reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspark_jax.speculators_common.errors import CheckpointError
from dspark_jax.speculators_common.formats.draft_config import DraftConfig
from dspark_jax.speculators_common.formats.rope.writer import rope_parameters

# One reason why a format cannot describe a draft: field, value found, values allowed.
Fault = tuple[str, object, str]


def refuse_unwritable(config: DraftConfig, format_title: str, faults: Sequence[Fault]) -> None:
    """Raise one `CheckpointError` that names the format and every fault, if there are any."""
    if not faults:
        return
    listed = "; ".join(f"{field}: found {found!r}, allowed {allowed}" for field, found, allowed in faults)
    raise CheckpointError(
        f"{config.source or 'draft config'}: cannot be written in the {format_title} format: {listed}"
    )


def common_faults(config: DraftConfig) -> list[Fault]:
    """Values that are allowed in a `DraftConfig` made by a program, but not in any file of a block draft."""
    faults: list[Fault] = []
    if config.max_position_embeddings is None:
        faults.append(("max_position_embeddings", None, "an integer >= 1, as every file states it"))
    if config.thresholds is not None:
        faults.append(("thresholds", list(config.thresholds.values), "None, as the format has no such field"))
    return faults


def qwen3_faults(config: DraftConfig) -> list[Fault]:
    """Reasons why `config` cannot be written as a draft with Qwen3 layers, in any format.

    A writer removes the faults of fields that its format does have.
    """
    if config.style != "qwen3":
        return [
            (
                "architectures",
                config.architecture,
                f"a draft of Qwen3 layers; this one has layers of the {config.style} style",
            )
        ]
    faults = common_faults(config)
    for field, found, neutral in (
        ("input_embedding_scale", config.embedding_scale, 1.0),
        ("output_multiplier", config.output_multiplier, 1.0),
        ("final_logit_softcapping", config.final_logit_softcapping, None),
        ("attention_k_eq_v", config.k_eq_v, False),
    ):
        if found != neutral:
            faults.append((field, found, f"{neutral}, as the format has no such field"))
    if config.rope.kind == "proportional":
        faults.append(("rope_type", config.rope.kind, "default, linear, llama3 or yarn"))
    elif config.rope.rotary_dim != config.head_dim:
        share = config.rope.rotary_dim / config.head_dim
        faults.append(("partial_rotary_factor", share, "1.0: readers of the format rotate the whole head"))
    return faults


def qwen3_network(config: DraftConfig) -> dict[str, Any]:
    """The fields of Qwen3 layers that all formats name alike: sizes, activation, rotation.

    Fields with a default are written too, because readers of other libraries may have other defaults.
    """
    return {
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": rope_parameters(config.rope, config.head_dim),
        "tie_word_embeddings": False,
    }
