"""Writing the `config.json` of a z-lab DFlash draft. The inverse of `from_zlab`."""

from __future__ import annotations

from typing import Any

from dspark_jax.speculators_common.formats.draft_config import DraftConfig
from dspark_jax.speculators_common.formats.draft_writer import Fault, qwen3_faults, qwen3_network, refuse_unwritable
from dspark_jax.speculators_common.formats.layer_masks import FULL, SLIDING
from dspark_jax.speculators_common.formats.zlab.names import ARCHITECTURE

_BLOCK_FIELDS = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")


def to_zlab(config: DraftConfig, *, dtype: str | None = None) -> dict[str, Any]:
    """The fields of the `config.json`. `from_zlab` gives an equal config back.

    `dtype` is the name of the stored tensors' type; `None` leaves the field out. The format has only Qwen3 layers,
    fill-in blocks, no Markov and confidence heads, the vocabulary, hidden size, embedding and head of the target, and
    one window for all sliding layers, counted from each query slot. Causality is the same in all layers, or true
    exactly in the sliding ones. Raises one `CheckpointError` that lists every value of `config` that cannot be written.
    """
    refuse_unwritable(config, "z-lab DFlash", _faults(config))
    windows = [layer.window for layer in config.layers]
    window = next((width for width in windows if width is not None), None)
    block: dict[str, Any] = {
        "target_layer_ids": [int(tap) - 1 for tap in config.taps],
        "mask_token_id": config.mask_token_id,
    }
    if any(layer.causal != (layer.window is not None) for layer in config.layers):
        block["is_causal"] = config.layers[0].causal
    neutral = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None}
    found = (config.embedding_scale, config.output_multiplier, config.final_logit_softcapping)
    block |= {name: value for name, value in zip(_BLOCK_FIELDS, found, strict=True) if value != neutral[name]}
    fields = {
        "architectures": [ARCHITECTURE],
        **qwen3_network(config),
        "layer_types": [FULL if width is None else SLIDING for width in windows],
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "block_size": config.block_size,
        "dflash_config": block,
    }
    if config.num_target_layers is not None:
        fields["num_target_layers"] = config.num_target_layers
    return fields if dtype is None else {**fields, "dtype": dtype}


def _faults(config: DraftConfig) -> list[Fault]:
    # Unlike the other formats of Qwen3 layers, this one has fields for scales and the soft-cap.
    faults = [fault for fault in qwen3_faults(config) if fault[0] not in _BLOCK_FIELDS]
    if config.style != "qwen3":
        return faults
    windows = sorted({layer.window for layer in config.layers if layer.window is not None})
    causal = [layer.causal for layer in config.layers]
    depth = config.num_target_layers
    by_kind = all(layer.causal == (layer.window is not None) for layer in config.layers)
    for name, value, fits, allowed in (
        ("markov_rank", config.markov_rank, config.markov_rank == 0, "0: the format has no heads"),
        ("enable_confidence_head", config.enable_confidence_head, not config.enable_confidence_head, "false"),
        ("sample_from_anchor", config.sample_from_anchor, not config.sample_from_anchor, "false: a fill-in block"),
        (
            "draft_vocab_size",
            config.draft_vocab_size,
            config.draft_vocab_size == config.vocab_size,
            f"{config.vocab_size} (vocab_size): the format has no draft vocabulary",
        ),
        (
            "target_hidden_size",
            config.target_hidden_size,
            config.target_hidden_size == config.hidden_size,
            f"{config.hidden_size} (hidden_size): the format knows one width",
        ),
        (
            "taps",
            list(config.taps),
            depth is None or all(int(tap) < depth for tap in config.taps),
            f"taps below the last of the target's {depth} layers",
        ),
        ("embed_tokens", "in the draft", not config.stores_tables, "the target's embedding and head"),
        ("sliding_window", windows, len(windows) < 2, "one window for all sliding layers"),
        (
            "sliding_window",
            windows,
            not windows or config.window_origin == "query",
            "a window counted from each query slot",
        ),
        (
            "is_causal",
            causal,
            by_kind or len(set(causal)) == 1,
            "the same for all layers, or true in sliding ones alone",
        ),
    ):
        if not fits:
            faults.append((name, value, allowed))
    return faults
