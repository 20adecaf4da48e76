"""Writing the `config.json` of a DeepSpec draft with Qwen3 layers. The inverse of `from_deepspec`."""

from __future__ import annotations

from typing import Any

from dspark_jax.speculators_common.formats.deepspec.names import QWEN3_ARCHITECTURE
from dspark_jax.speculators_common.formats.draft_config import DraftConfig
from dspark_jax.speculators_common.formats.draft_writer import Fault, qwen3_faults, qwen3_network, refuse_unwritable
from dspark_jax.speculators_common.formats.layer_masks import FULL

# The number of anchors per training sequence, as in the released configs. It does not affect drafting, but DeepSpec
# does not load a config without it.
_NUM_ANCHORS = 512


def to_deepspec(config: DraftConfig, *, dtype: str | None = None) -> dict[str, Any]:
    """The fields of the `config.json`, all at the top level. `from_deepspec` gives an equal config back.

    `dtype` is the name of the stored tensors' type; `None` leaves the field out. The format has only full,
    bidirectional Qwen3 layers, anchor-first blocks, the vocabulary and the hidden size of the target, base logits
    without scale and soft-cap, and a rotation of all head elements. It states the number of target layers. Raises one
    `CheckpointError` that lists every value of `config` that cannot be written.
    """
    faults = qwen3_faults(config)
    refuse_unwritable(config, "DeepSpec", faults if config.style != "qwen3" else faults + block_faults(config))
    fields = {
        "architectures": [QWEN3_ARCHITECTURE],
        **qwen3_network(config),
        "layer_types": [FULL] * config.num_hidden_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        **block_fields(config),
    }
    return fields if dtype is None else {**fields, "dtype": dtype}


def block_fields(config: DraftConfig) -> dict[str, Any]:
    """The fields of the block and the heads. Fields of a head are written only if the draft has that head."""
    fields: dict[str, Any] = {
        "num_target_layers": config.num_target_layers,
        "target_layer_ids": [int(tap) - 1 for tap in config.taps],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "num_anchors": _NUM_ANCHORS,
        "markov_rank": config.markov_rank,
        "enable_confidence_head": config.enable_confidence_head,
    }
    if config.markov_rank > 0:
        fields["markov_head_type"] = config.markov_head_type
    if config.enable_confidence_head:
        fields["confidence_head_with_markov"] = config.confidence_head_with_markov
    return fields


def block_faults(config: DraftConfig) -> list[Fault]:
    """Reasons why the block of `config` cannot be written in the format, with Qwen3 or Gemma4 layers."""
    faults: list[Fault] = []
    if not config.sample_from_anchor:
        faults.append(("sample_from_anchor", False, "true: drafts of the format are anchor-first"))
    if config.draft_vocab_size != config.vocab_size:
        faults.append(
            (
                "draft_vocab_size",
                config.draft_vocab_size,
                f"{config.vocab_size} (vocab_size): the format has no draft vocabulary",
            )
        )
    if config.target_hidden_size != config.hidden_size:
        faults.append(
            (
                "target_hidden_size",
                config.target_hidden_size,
                f"{config.hidden_size} (hidden_size): the format knows one width",
            )
        )
    windows = [layer.window for layer in config.layers]
    if any(width is not None for width in windows):
        faults.append(
            (
                "layer_types",
                [FULL if width is None else f"window {width}" for width in windows],
                f"{FULL} in every layer",
            )
        )
    elif any(layer.causal for layer in config.layers):
        faults.append(
            (
                "causal",
                [layer.causal for layer in config.layers],
                "false in every layer: blocks of the format are bidirectional",
            )
        )
    depth = config.num_target_layers
    if depth is None:
        faults.append(("num_target_layers", None, "the number of layers of the target (--target tells it)"))
    elif any(int(tap) >= depth for tap in config.taps):
        faults.append(("taps", list(config.taps), f"taps below the last of the target's {depth} layers"))
    return faults
