"""One tiny target, and a draft of every family for it, as directories that a user might have."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.architectures import dspark_compact
from dspark_jax.speculators_common.formats.draft_config import SlotThresholds
from dspark_jax.speculators_common.numerics.matmul import kernel_values, set_kernel_values
from tests.support.tiny_checkpoints import TinyCheckpoint, draft_config, random_tensors, target_config

VOCAB, HIDDEN, LAYERS, MASK, BLOCK = 13, 32, 3, 12, 5
TARGET_ID = f"tiny@{HIDDEN}x{VOCAB}"
QWEN3_NETWORK = {
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
}
DEEPSPEC_BLOCK = {
    "num_target_layers": LAYERS,
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "target_layer_ids": [-1, 0, 1],
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
NO_HEADS = {"markov_rank": 0, "enable_confidence_head": False}
GEMMA4 = {
    "architectures": ["Gemma4DSparkModel"],
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_k_eq_v": True,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "final_logit_softcapping": 8.0,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"}
    },
}
ZLAB_BLOCK = {"block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": [0, 1]}
ZLAB = {"architectures": ["DFlashDraftModel"], "num_target_layers": LAYERS, **QWEN3_NETWORK}
COMPACT = dspark_compact.CompactSettings(
    block_size=BLOCK,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    markov_rank=6,
    tap_layers=(0, 1, LAYERS),
)


@functools.cache
def tiny_target() -> TinyCheckpoint:
    """A Qwen3 target of three layers with an untied head."""
    config = target_config("Qwen3ForCausalLM", **{**QWEN3_NETWORK, "num_hidden_layers": LAYERS})
    return TinyCheckpoint(config=config, tensors=random_tensors(config, seed=1))


def without(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """`fields` without some names."""
    return {name: value for name, value in fields.items() if name not in names}


def gemma4_config(**fields: Any) -> dict[str, Any]:
    """`config.json` of a DeepSpec Gemma4 draft."""
    network = without(QWEN3_NETWORK, "hidden_act", "rope_theta", "num_key_value_heads", "head_dim")
    return {**network, **DEEPSPEC_BLOCK, **GEMMA4, **fields}


def deepspec_dflash_config(**fields: Any) -> dict[str, Any]:
    """`config.json` of a DFlash draft that DeepSpec trained: its Qwen3 draft without heads."""
    block = without(DEEPSPEC_BLOCK, "markov_head_type", "confidence_head_with_markov")
    return {"architectures": ["Qwen3DSparkModel"], **QWEN3_NETWORK, **block, **NO_HEADS, **fields}


def zlab_config(**fields: Any) -> dict[str, Any]:
    """`config.json` of a z-lab DFlash draft."""
    return {**ZLAB, "dflash_config": ZLAB_BLOCK, **fields}


def speculators_dspark_config(**fields: Any) -> dict[str, Any]:
    """`config.json` of a speculators DSpark draft with a sliding and a full layer."""
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "use_sliding_window": True}
    network = {
        **without(QWEN3_NETWORK, "rms_norm_eps", "hidden_act", "rope_theta", "max_position_embeddings"),
        **layers,
    }
    block = without(DEEPSPEC_BLOCK, "num_target_layers", "target_layer_ids")
    return draft_config(network=network, **{**block, "aux_hidden_state_layer_ids": [1, 2], **fields})


def speculators_dflash_config(**fields: Any) -> dict[str, Any]:
    """`config.json` of a speculators DFlash draft."""
    network = without(QWEN3_NETWORK, "rms_norm_eps", "hidden_act", "rope_theta", "max_position_embeddings")
    block = {"aux_hidden_state_layer_ids": [1, 2], "block_size": BLOCK, "mask_token_id": MASK}
    return {
        **draft_config(network=network, **block),
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        **fields,
    }


def _checkpoint(
    config: Mapping[str, Any], *optional: str, seed: int = 2, **tensors: np.ndarray
) -> Callable[[Path], Path]:
    return lambda folder: TinyCheckpoint(
        config=config, tensors={**random_tensors(config, seed, *optional), **tensors}
    ).write(folder)


def _compact(**settings: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        dims = dspark_compact.CompactDims(hidden_size=HIDDEN, vocab_size=VOCAB, rms_norm_eps=1e-6, num_layers=LAYERS)
        draft = dspark_compact.init_from_dims(
            dims, dspark_compact.CompactSettings(**{**vars(COMPACT), **settings}), TARGET_ID, seed=3
        )
        return dspark_compact.save(loud(draft), folder)

    return write


def loud(draft: dspark_compact.CompactDraft, seed: int = 4) -> dspark_compact.CompactDraft:
    """The draft with larger weights, at which every part matters, instead of the small initial ones."""
    rng = np.random.default_rng(seed)
    state = nnx.state(draft)
    for _, parameter in nnx.to_flat_state(state):
        values = kernel_values(parameter)
        noisy = values + jnp.asarray(
            rng.normal(size=values.shape) * (1.2 / np.sqrt(max(values.shape[0], 1))), values.dtype
        )
        set_kernel_values(parameter, noisy)
    nnx.update(draft, state)
    return draft


_TABLES = ("embed_tokens.weight", "lm_head.weight")
_OFFSETS = np.asarray(range(1, VOCAB, 2), np.int64) - np.arange(VOCAB // 2)

# What each draft is -> how to write its directory.
FAMILIES: dict[str, Callable[[Path], Path]] = {
    "speculators dspark, fill-in, borrowed tables": _checkpoint(speculators_dspark_config(sample_from_anchor=False)),
    "speculators dspark, gated, pruned": _checkpoint(
        speculators_dspark_config(sample_from_anchor=True, markov_head_type="gated", draft_vocab_size=VOCAB // 2),
        *_TABLES,
        "d2t",
        d2t=_OFFSETS,
    ),
    "deepspec qwen3": _checkpoint({"architectures": ["Qwen3DSparkModel"], **QWEN3_NETWORK, **DEEPSPEC_BLOCK}, *_TABLES),
    "deepspec gemma4": _checkpoint(gemma4_config(), *_TABLES),
    "deepspec gemma4, own values, rank 0": _checkpoint(
        without(
            gemma4_config(attention_k_eq_v=False, num_key_value_heads=2, **NO_HEADS),
            "markov_head_type",
            "confidence_head_with_markov",
        ),
        *_TABLES,
    ),
    "deepspec dflash": _checkpoint(deepspec_dflash_config(), *_TABLES),
    "z-lab dflash": _checkpoint(
        zlab_config(
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=6,
            dflash_config={
                **ZLAB_BLOCK,
                "input_embedding_scale": 2.0,
                "output_multiplier": 0.5,
                "final_logit_softcapping": 5.0,
            },
        )
    ),
    "speculators dflash, pruned": _checkpoint(
        speculators_dflash_config(draft_vocab_size=VOCAB // 2), "lm_head.weight", "d2t", d2t=_OFFSETS
    ),
    "compact": _compact(),
    "compact, rnn": _compact(sequence_head="rnn"),
    "compact, thresholds": _compact(
        thresholds=SlotThresholds(values=(0.9, 0.25, 0.5, 0.45, 0.4), target=0.5, samples=64)
    ),
}
