"""Writing the `config.json` of a speculators draft, for releases from 0.7 on. The inverse of `from_speculators`."""

from __future__ import annotations

from typing import Any

from dspark_jax.speculators_common.formats.draft_config import DraftConfig
from dspark_jax.speculators_common.formats.draft_writer import Fault, qwen3_faults, qwen3_network, refuse_unwritable
from dspark_jax.speculators_common.formats.layer_masks import FULL, SLIDING
from dspark_jax.speculators_common.formats.speculators.names import ARCHITECTURES, TYPE_FIELD


def to_speculators(config: DraftConfig, *, dtype: str | None = None) -> dict[str, Any]:
    """The fields of the `config.json`. `from_speculators` gives an equal config back.

    A draft with a DFlash architecture and without heads is written as DFlash, every other draft as DSpark. `dtype` is
    the name of the stored tensors' type; `None` leaves the field out. The format has only Qwen3 layers, one window for
    all sliding layers, counted from the anchor, one causality per layer type, base logits without scale and soft-cap,
    and a rotation of all head elements. Raises one `CheckpointError` that lists every value of `config` that cannot be
    written.
    """
    refuse_unwritable(config, "speculators", _faults(config))
    has_heads = config.markov_rank > 0 or config.enable_confidence_head
    is_dflash = config.architecture in ARCHITECTURES["dflash"] and not has_heads
    kind = "dflash" if is_dflash else "dspark"
    fields: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind][0]],
        TYPE_FIELD: kind,
        "block_size": config.block_size,
        "sample_from_anchor": config.sample_from_anchor,
        "aux_hidden_state_layer_ids": list(config.taps),
        "mask_token_id": config.mask_token_id,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None if config.target_hidden_size == config.hidden_size else config.target_hidden_size,
        "sliding_window_non_causal": any(layer.window is not None and not layer.causal for layer in config.layers),
    }
    if _full_layers_are_causal(config):
        fields["causal"] = True
    if not is_dflash:
        fields |= {
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_head_type if config.markov_rank else "vanilla",
            "enable_confidence_head": config.enable_confidence_head,
            "confidence_head_with_markov": config.confidence_head_with_markov,
        }
    if config.num_target_layers is not None:
        # The library does not know this field, but keeps it. A conversion to DeepSpec needs it.
        fields["num_target_layers"] = config.num_target_layers
    fields |= {
        "tie_word_embeddings": False,
        "speculators_config": _library_section(config, kind),
        "transformer_layer_config": _network(config),
    }
    return fields if dtype is None else {**fields, "dtype": dtype}


def _library_section(config: DraftConfig, kind: str) -> dict[str, Any]:
    """The fields of `speculators_config`."""
    return {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": _speculative_tokens(config),
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            },
        ],
        "verifier": {"name_or_path": config.target_name, "architectures": list(config.target_architectures)},
    }


def _speculative_tokens(config: DraftConfig) -> int:
    """The recommended number of drafts per round; without one, the number of drafts of a block.

    A recommended number of `block_size - 1` or more is not written, because readers infer the layout from it.
    """
    stated = config.stated_drafts
    return config.max_drafts if stated is None or stated >= config.block_size - 1 else stated


def _network(config: DraftConfig) -> dict[str, Any]:
    """The fields of `transformer_layer_config`."""
    windows = [layer.window for layer in config.layers]
    window = max((width for width in windows if width is not None), default=None)
    return {
        **qwen3_network(config),
        "layer_types": [FULL if width is None else SLIDING for width in windows],
        "sliding_window": window,
        # Other readers of Qwen3 configs ignore the window without this field.
        "use_sliding_window": window is not None,
    }


def _full_layers_are_causal(config: DraftConfig) -> bool:
    return any(layer.window is None and layer.causal for layer in config.layers)


def _faults(config: DraftConfig) -> list[Fault]:
    faults = qwen3_faults(config)
    if config.style != "qwen3":
        return faults
    windows = sorted({layer.window for layer in config.layers if layer.window is not None})
    if windows and config.window_origin != "anchor":
        faults.append(
            (
                "sliding_window",
                windows[0],
                "a window counted from the anchor; this draft's is counted from each query slot",
            )
        )
    if len(windows) > 1:
        faults.append(("sliding_window", windows, "one window for all sliding layers"))
    sliding = {layer.causal for layer in config.layers if layer.window is not None}
    full = {layer.causal for layer in config.layers if layer.window is None}
    if len(sliding) > 1 or len(full) > 1 or (full == {True} and sliding == {False}):
        causal = [layer.causal for layer in config.layers]
        faults.append(
            (
                "causal",
                causal,
                "the same for all sliding layers and for all full ones, and causal full layers only if all are causal",
            )
        )
    return faults
