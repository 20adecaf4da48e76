"""The compact format: reading and writing `dspark.json`, and the names and shapes of its tensors.

A compact draft is a small float32 network with as many key heads as query heads, no rotation, and a learned embedding
for each masked slot. It uses the embedding and the head of the target. `dspark.json` describes it completely. The
`config.json` beside that file only lets other programs find the draft.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from dspark_jax.speculators_common.errors import CheckpointError, PairError, field_error, shown
from dspark_jax.speculators_common.formats.choice import default_choices
from dspark_jax.speculators_common.formats.draft_config import (
    FINAL,
    DraftConfig,
    DraftOverrides,
    LayerMask,
    SlotThresholds,
)
from dspark_jax.speculators_common.formats.fields import Fields
from dspark_jax.speculators_common.formats.rope.config import RopeConfig
from dspark_jax.speculators_common.formats.size_limits import MAX_BLOCK_SIZE, MAX_LAYERS, MAX_SIZE
from dspark_jax.speculators_common.formats.unknown_fields import unknown_fields

DSPARK_JSON = "dspark.json"
ARCHITECTURE, FAMILY = "DsparkDrafter", "compact"
SequenceHead = Literal["markov", "rnn"]
_KIND, _VARIANT, _VERSION = "dspark-drafter", "dspark", 1
_NO_ROTATION = RopeConfig(theta=1.0, rotary_dim=0)
# Field in `config` -> (field of `CompactSettings`, largest value). The smallest value is 1.
_SIZES = {
    "gamma": ("block_size", MAX_BLOCK_SIZE),
    "dDraft": ("hidden_size", MAX_SIZE),
    "nLayers": ("num_hidden_layers", MAX_LAYERS),
    "nHeads": ("num_attention_heads", MAX_SIZE),
    "markovRank": ("markov_rank", MAX_SIZE),
    "ffMult": ("feed_forward_multiple", MAX_SIZE),
}
_MAX_LISTED_FAULTS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompactDims:
    """The sizes of the target that a compact draft depends on."""

    hidden_size: int  # H
    vocab_size: int  # V
    rms_norm_eps: float
    num_layers: int | None = None  # no file states it; None: not known


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompactSettings:
    """The settings of a compact draft, with the defaults of the format.

    `tap_layers` are ids of the format: x is the output of layer x, which is tap x + 1. The number of target layers
    stands for the tap after the final norm.
    """

    block_size: int = 5
    hidden_size: int = 1024
    num_hidden_layers: int = 5
    num_attention_heads: int = 8
    markov_rank: int = 256
    feed_forward_multiple: int = 2
    tap_layers: tuple[int, ...] = (20, 31, 41, 42)
    sequence_head: SequenceHead = "markov"
    thresholds: SlotThresholds | None = None


# Field in `config` -> its default, of the fields that a file may leave open. A missing `seqHead` means `markov`.
_DEFAULTS = {
    **{name: getattr(CompactSettings(), attribute) for name, (attribute, _) in _SIZES.items()},
    "tapLayers": CompactSettings().tap_layers,
}


def from_compact(raw: Mapping[str, Any], file: Path | str, overrides: DraftOverrides | None = None) -> DraftConfig:
    """Read the config of a compact draft. `raw` is the content of `dspark.json`, `file` its path.

    All `taps` are numbers. `DraftConfig.for_target` replaces the one after the final norm by `FINAL`. Raises
    `CheckpointError` for a missing field, for a value that the format does not allow, and for any override.
    """
    top = Fields(raw, file)
    if not top.has("kind") and top.has("architectures"):
        raise CheckpointError(
            f"{file}: {DSPARK_JSON}: missing beside it, allowed the file that describes a {ARCHITECTURE}"
        )
    _check_header(top)
    for name, value in dataclasses.asdict(overrides or DraftOverrides()).items():
        if value is not None:
            raise CheckpointError(
                f"{file}: {name}: found {value!r} stated by the user, allowed nothing: a compact draft leaves no such "
                "choice"
            )
    dims, described = top.section("dims"), top.section("config")
    settings = _read_settings(described)
    config = compact_config(
        settings,
        CompactDims(
            hidden_size=dims.integer("hiddenSize", minimum=1, maximum=MAX_SIZE),
            vocab_size=dims.integer("vocabSize", minimum=1),
            rms_norm_eps=dims.number("eps", above=0, maximum=1),
        ),
        target_id=top.string("target_id"),
        file=file,
    )
    _check_sizes_in_target_id(top, config)
    _check_param_names(top, config)
    return dataclasses.replace(
        config, choices=default_choices(described, _DEFAULTS), unknown_fields=unknown_fields(top)
    )


def compact_config(
    settings: CompactSettings, dims: CompactDims, *, target_id: str, file: Path | str = DSPARK_JSON
) -> DraftConfig:
    """The `DraftConfig` of a compact draft. Raises `CheckpointError` for settings that are out of range or conflict.

    `target_id` is the name of the target, `<model>@<H>x<V>`. `file` is used in messages.
    """
    _check_settings(settings, file)
    config = DraftConfig(
        hidden_size=settings.hidden_size,
        intermediate_size=settings.feed_forward_multiple * settings.hidden_size,
        num_hidden_layers=settings.num_hidden_layers,
        num_attention_heads=settings.num_attention_heads,
        num_key_value_heads=settings.num_attention_heads,
        head_dim=settings.hidden_size // settings.num_attention_heads,
        rms_norm_eps=dims.rms_norm_eps,
        attention_bias=False,
        vocab_size=dims.vocab_size,
        draft_vocab_size=dims.vocab_size,
        target_hidden_size=dims.hidden_size,
        taps=tuple(x + 1 for x in settings.tap_layers),
        block_size=settings.block_size,
        sample_from_anchor=True,
        mask_token_id=None,
        markov_rank=settings.markov_rank,
        markov_head_type="tanh_rnn" if settings.sequence_head == "rnn" else "vanilla",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        layers=(LayerMask(window=None, causal=False),) * settings.num_hidden_layers,
        rope=_NO_ROTATION,
        max_position_embeddings=None,
        style="compact",
        thresholds=settings.thresholds,
        architecture=ARCHITECTURE,
        family=FAMILY,
        source=str(file),
        target_name=target_id,
        stores_tables=False,
        taps_reach_final=True,
    )
    return config if dims.num_layers is None else config.for_target(dims.num_layers)


def to_compact(config: DraftConfig) -> dict[str, Any]:
    """The content of `dspark.json`.

    `from_compact` gives an equal config back, once `for_target` has completed it with the number of target layers.
    """
    described: dict[str, Any] = {
        "gamma": config.block_size,
        "dDraft": config.hidden_size,
        "nLayers": config.num_hidden_layers,
        "nHeads": config.num_attention_heads,
        "markovRank": config.markov_rank,
        "ffMult": config.intermediate_size // config.hidden_size,
        "tapLayers": [config.num_target_layers if tap == FINAL else int(tap) - 1 for tap in config.taps],
        "seqHead": "rnn" if config.markov_head_type == "tanh_rnn" else "markov",
    }
    if config.thresholds is not None:
        record = {"target": config.thresholds.target, "samples": config.thresholds.samples}
        described["sts"] = {
            "thresholds": list(config.thresholds.values),
            **{name: value for name, value in record.items() if value is not None},
        }
    return {
        "kind": _KIND,
        "variant": _VARIANT,
        "version": _VERSION,
        "target_id": config.target_name,
        "config": described,
        "dims": {"hiddenSize": config.target_hidden_size, "vocabSize": config.vocab_size, "eps": config.rms_norm_eps},
        "param_names": list(tensor_shapes(config)),
    }


def to_config_json(config: DraftConfig) -> dict[str, Any]:
    """The content of the `config.json` by which other programs find the draft."""
    return {
        "model_type": "dspark_assistant",
        "architectures": [ARCHITECTURE],
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "target_id": config.target_name,
    }


def check_config_json(config_json: Mapping[str, Any], file: Path | str, raw: Mapping[str, Any]) -> None:
    """Check that `config.json` and the `dspark.json` beside it agree.

    `config_json` is the content of `file`, `raw` that of `dspark.json`. Raises `CheckpointError` for a value in
    `config_json` that differs.
    """
    described, dims = Fields(raw, DSPARK_JSON).section("config"), Fields(raw, DSPARK_JSON).section("dims")
    expected = {
        "hidden_size": ("config.dDraft", described.raw.get("dDraft")),
        "vocab_size": ("dims.vocabSize", dims.raw.get("vocabSize")),
        "target_hidden_size": ("dims.hiddenSize", dims.raw.get("hiddenSize")),
        "target_id": ("target_id", raw.get("target_id")),
    }
    for name, (path, value) in expected.items():
        if config_json.get(name) is not None and value is not None and config_json[name] != value:
            raise field_error(file, name, config_json[name], f"{value!r}, the {path} of {DSPARK_JSON} beside it")


def tensor_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor, in the order of `param_names`. All are float32; matrices are `[in, out]`."""
    hidden, width, rank = config.hidden_size, config.intermediate_size, config.markov_rank
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(config.num_hidden_layers):
        shapes |= {f"bb.{layer}.attn_norm": (hidden,)}
        shapes |= {f"bb.{layer}.{name}": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"bb.{layer}.ff_norm": (hidden,)}
        shapes |= {f"bb.{layer}.{name}": (hidden, width) for name in ("gate", "up")}
        shapes |= {f"bb.{layer}.down": (width, hidden)}
    shapes |= {
        "W_c": (config.num_taps * config.target_hidden_size, hidden),
        "ctx_norm": (hidden,),
        "tok_proj": (config.target_hidden_size, hidden),
        "mask_emb": (config.block_size - 1, hidden),
        "block_pos": (config.block_size, hidden),
        "out_norm": (hidden,),
        "out_proj": (hidden, config.target_hidden_size),
        "markov.w1": (config.vocab_size, rank),
        "markov.w2": (rank, config.vocab_size),
        "conf.w": (hidden + rank, 1),
        "conf.b": (1,),
    }
    if config.markov_head_type == "tanh_rnn":
        shapes |= {"rnn.wH": (rank, rank), "rnn.bH": (rank,), "rnn.wO": (rank, config.vocab_size)}
    return shapes


def check_target_id(config: DraftConfig, live: str) -> None:
    """Raise `PairError` unless the draft was made for the loaded target. `live` is its id, `<model>@<H>x<V>`."""
    if config.target_name != live:
        raise PairError(
            f"{config.source}: target_id: found {config.target_name!r}, allowed {live!r}, the id of the live target"
        )


def _check_header(top: Fields) -> None:
    top.string("kind", allowed=(_KIND,))
    if not top.has("variant"):
        raise top.missing(
            "variant", f"{_VARIANT}; files without it hold an older, single-vector draft that is not supported"
        )
    top.string("variant", allowed=(_VARIANT, "dflash"))
    version = top.integer("version")
    if version != _VERSION:
        raise top.error("version", version, _VERSION)


def _read_settings(config: Fields) -> CompactSettings:
    sts = config.section("sts")
    defaults = CompactSettings()
    head = config.string("seqHead", allowed=("markov", "rnn"), default="markov")
    sizes = {
        attribute: config.integer(name, minimum=1, maximum=maximum, default=getattr(defaults, attribute))
        for name, (attribute, maximum) in _SIZES.items()
    }
    return CompactSettings(
        **sizes,
        tap_layers=config.int_list("tapLayers", default=defaults.tap_layers),
        sequence_head="rnn" if head == "rnn" else "markov",
        thresholds=_read_thresholds(sts) if config.has("sts") else None,
    )


def _read_thresholds(sts: Fields) -> SlotThresholds:
    stated = sts.raw.get("thresholds")
    sts.ignore("thresholds")
    if not isinstance(stated, list) or not all(
        isinstance(x, (int, float)) and not isinstance(x, bool) and 0 <= x <= 1 for x in stated
    ):
        raise field_error(
            sts.file, f"{sts.prefix}.thresholds", stated, "a list of numbers from 0 to 1, one for each slot"
        )
    target, samples = sts.number("target", default=None), sts.integer("samples", minimum=0, default=None)
    return SlotThresholds(values=tuple(float(x) for x in stated), target=target, samples=samples)


def _check_settings(settings: CompactSettings, file: Path | str) -> None:
    for name, (attribute, maximum) in _SIZES.items():
        value = getattr(settings, attribute)
        if not 1 <= value <= maximum:
            raise field_error(file, f"config.{name}", value, f"an integer >= 1 and <= {maximum}")
    if settings.feed_forward_multiple * settings.hidden_size > MAX_SIZE:
        raise field_error(
            file, "config.ffMult", settings.feed_forward_multiple, f"at most {MAX_SIZE} / dDraft {settings.hidden_size}"
        )
    if settings.hidden_size % settings.num_attention_heads:
        raise field_error(
            file, "config.dDraft", settings.hidden_size, f"a multiple of nHeads {settings.num_attention_heads}"
        )
    taps = settings.tap_layers
    if not taps or taps[0] < 0 or taps[-1] > MAX_LAYERS or list(taps) != sorted(set(taps)):
        convention = "x = residual stream after layer x, the target's depth = after its final norm"
        raise field_error(
            file,
            "config.tapLayers",
            list(taps),
            f"a non-empty, strictly increasing list of ids from 0 to {MAX_LAYERS} ({convention})",
        )
    thresholds = () if settings.thresholds is None else settings.thresholds.values
    if settings.thresholds is not None and len(thresholds) != settings.block_size:
        allowed = f"one number for each of gamma {settings.block_size} slots, found {len(thresholds)}"
        raise field_error(file, "config.sts.thresholds", list(thresholds), allowed)


def _check_sizes_in_target_id(top: Fields, config: DraftConfig) -> None:
    sizes = re.search(r"@(\d+)x(\d+)$", config.target_name or "")
    own = (config.target_hidden_size, config.vocab_size)
    if sizes is not None and sizes.groups() != (str(own[0]), str(own[1])):
        raise top.error(
            "target_id",
            config.target_name,
            f"an id that ends in @{own[0]}x{own[1]}, the hiddenSize and vocabSize of dims",
        )


def _described_size(config: DraftConfig) -> str:
    """The settings that determine which tensors there are, for messages."""
    return f"nLayers {config.num_hidden_layers}, seqHead {'rnn' if config.markov_head_type == 'tanh_rnn' else 'markov'}"


def _check_param_names(top: Fields, config: DraftConfig) -> None:
    stated, expected = collections.Counter(top.string_list("param_names")), tensor_shapes(config)
    faults = [
        *(f"{name!r} missing" for name in expected if name not in stated),
        *(f"{shown(name)} unexpected" for name in stated if name not in expected),
        *(f"{shown(name)} twice" for name, count in stated.items() if count > 1),
    ]
    if len(faults) > _MAX_LISTED_FAULTS:
        faults[_MAX_LISTED_FAULTS:] = [f"and {len(faults) - _MAX_LISTED_FAULTS} more"]
    if faults:
        raise CheckpointError(
            f"{top.file}: param_names: {', '.join(faults)}; allowed the {len(expected)} tensors that config describes "
            f"({_described_size(config)})"
        )
