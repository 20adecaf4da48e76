"""Readers of `config.json` fields that several target families share. They raise `CheckpointError` for a bad field."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypedDict

from dspark_jax.architectures.decoder.recurrent_state import refuse_recurrent_layers
from dspark_jax.speculators_common.formats.choice import Choice, default_choices
from dspark_jax.speculators_common.formats.fields import Fields
from dspark_jax.speculators_common.formats.quantised import refuse_quantised
from dspark_jax.speculators_common.formats.rope.config import RopeConfig
from dspark_jax.speculators_common.formats.rope.fields import parse_rope, theta_choice, usable_length
from dspark_jax.speculators_common.formats.size_limits import MAX_LAYERS, MAX_SIZE
from dspark_jax.speculators_common.formats.unknown_fields import unknown_fields
from dspark_jax.speculators_common.formats.window_choices import (
    FIRST_SLIDING_LAYER,
    layer_types_decide,
    types_text,
    unused,
)

HARMLESS_FIELDS = [
    "architectures",
    "auto_map",
    "model_type",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "initializer_range",
    "attention_dropout",
    "pretraining_tp",
    "temperature",  # a sampling setting that old files state here
    "output_attentions",
    "output_hidden_states",
    "is_llama_config",
    "_name_or_path",
    "transformers.js_config",
]
# Fields that may be stated with these values only, which are true of every target here.
_NEUTRAL_FIELDS: Mapping[str, tuple[Any, ...]] = {"is_decoder": (True, False), "is_causal": (True,)}
DEFAULT_THETA = 10_000.0  # the default of `rope_theta`


class DecoderSizes(TypedDict):
    """The fields of `DecoderConfig` that every decoder states."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    max_position_embeddings: int


class DecoderGeometry(DecoderSizes):
    """The fields of `DecoderConfig` that every decoder with SiLU and one rotation states."""

    intermediate_size: int
    tie_word_embeddings: bool
    rope: RopeConfig
    choices: tuple[Choice, ...]


def read_decoder_geometry(
    fields: Fields, defaults: Mapping[str, int] | None = None, required: Collection[str] = ()
) -> DecoderGeometry:
    """Read the fields of `DecoderGeometry`. `defaults` and `required` are those of `read_decoder_sizes`."""
    require_activation(fields, "silu", "hidden_act")
    sizes = read_decoder_sizes(fields, defaults, required)
    rope = parse_rope(fields, head_dim=sizes["head_dim"], default_theta=DEFAULT_THETA)
    sizes["max_position_embeddings"] = usable_length(sizes["max_position_embeddings"], rope, fields.file)
    return {
        **sizes,
        "intermediate_size": fields.integer("intermediate_size", minimum=1, maximum=MAX_SIZE),
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", default=False),
        "rope": rope,
        "choices": theta_choice(fields, ("full_attention",), rope.theta),
    }


def read_decoder_sizes(
    fields: Fields, defaults: Mapping[str, int] | None = None, required: Collection[str] = ()
) -> DecoderSizes:
    """Read the fields of `DecoderSizes`.

    `defaults` are the values of sizes that a file of the family may omit. Without a default there, `head_dim` defaults
    to `hidden_size / num_attention_heads`, and `num_key_value_heads` to `num_attention_heads` unless `required` names
    it.
    """
    known = dict(defaults or {})
    refuse_quantised(fields.raw, fields.file)
    fields.ignore(*HARMLESS_FIELDS)
    hidden_size, num_heads = _size(fields, known, "hidden_size"), _size(fields, known, "num_attention_heads")
    if "num_key_value_heads" not in required:
        known.setdefault("num_key_value_heads", num_heads)
    num_kv_heads = _size(fields, known, "num_key_value_heads")
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads {num_heads}")
    if hidden_size % num_heads == 0:
        known.setdefault("head_dim", hidden_size // num_heads)
    elif not fields.has("head_dim") and "head_dim" not in known:
        raise fields.missing(
            "head_dim", f"an integer, as hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}"
        )
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": _size(fields, known, "num_hidden_layers", maximum=MAX_LAYERS),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": _size(fields, known, "head_dim", minimum=2),
        "rms_norm_eps": fields.number("rms_norm_eps", above=0, maximum=1, default=1e-6),
        "vocab_size": _size(fields, known, "vocab_size", maximum=None),
        "max_position_embeddings": _size(fields, known, "max_position_embeddings", maximum=None),
    }


def _size(
    fields: Fields, defaults: Mapping[str, int], name: str, *, minimum: int = 1, maximum: int | None = MAX_SIZE
) -> int:
    if name in defaults and not fields.has(name):
        return defaults[name]
    return fields.integer(name, minimum=minimum, maximum=maximum)


def require_activation(fields: Fields, supported: str, *names: str) -> None:
    """Raise `CheckpointError` if one of the fields `names` states another activation than `supported`."""
    for name in names:
        if fields.string(name, default=supported) != supported:
            raise fields.error(name, fields.string(name), supported)


def read_layer_kinds(fields: Fields, num_layers: int, default: Sequence[str]) -> tuple[str, ...]:
    """Read `layer_types`: `full_attention` or `sliding_attention` for each layer; `default` if it is missing."""
    refuse_recurrent_layers(fields)
    kinds = fields.string_list("layer_types", default=tuple(default))
    unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if unknown or len(kinds) != num_layers:
        raise fields.error(
            "layer_types",
            unknown[0] if unknown else list(kinds),
            f"{num_layers} entries of full_attention or sliding_attention (num_hidden_layers)",
        )
    return kinds


def read_windows(fields: Fields, kinds: Sequence[str], default_window: int | None = None) -> tuple[int | None, ...]:
    """The sliding window of each layer in positions, `None` for full attention.

    `kinds` are those of `read_layer_kinds`. `sliding_window` has no influence if no layer slides.
    """
    if "sliding_attention" not in kinds:
        fields.ignore("sliding_window")
        return (None,) * len(kinds)
    is_left_out = default_window is not None and not fields.has("sliding_window")
    window = default_window if is_left_out else fields.integer("sliding_window", minimum=1)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def unknown_target_fields(
    fields: Fields, top: Fields | None = None, neutral: Mapping[str, tuple[Any, ...]] | None = None
) -> tuple[str, ...]:
    """Dotted paths of the stated fields that no reader has read. `unknown_fields` says which of them are refused.

    `top` is the top level of a multimodal file, if `fields` are only its `text_config`. Its fields are checked too,
    except for the parts of the model (`text_config`, `vision_config`, ...). `neutral` are further fields of the family
    with the values that are always true of it.
    """
    known = {**_NEUTRAL_FIELDS, **(neutral or {})}
    if top is not None and top.raw is not fields.raw:
        parts = [name for name in top.raw if name.endswith("_config")]
        unknown_fields(top, [*HARMLESS_FIELDS, *parts], known)
    return unknown_fields(fields, (), known)


def require_full_layers(fields: Fields, num_layers: int) -> tuple[Choice, ...]:
    """Raise `CheckpointError` if a layer has a sliding window, for a family without such layers.

    `sliding_window` may be stated if `use_sliding_window` or `layer_types` says that no layer uses it. Returns the
    choices about it.
    """
    windows, choices = read_layer_windows(fields, num_layers)
    if any(window is not None for window in windows) and fields.has("layer_types"):
        raise fields.error(
            "layer_types", fields.raw.get("layer_types"), "full_attention layers: the family has no windows"
        )
    if fields.boolean("use_sliding_window", default=False):
        raise fields.error("use_sliding_window", True, "false: the family has no windows")
    if fields.has("sliding_window") and not (fields.has("use_sliding_window") or fields.has("layer_types")):
        raise fields.error("sliding_window", fields.raw["sliding_window"], "null: the family has no windows")
    return choices


def read_layer_windows(fields: Fields, num_layers: int) -> tuple[tuple[int | None, ...], tuple[Choice, ...]]:
    """The sliding window of each layer in positions, `None` for full attention, and the choices that were made.

    Without `layer_types`, `use_sliding_window` makes all layers slide but the first `max_window_layers`. Sliding layers
    beside a `use_sliding_window` that is false are refused, as no library runs such a file.
    """
    default = ["full_attention"] * num_layers
    fields.ignore("max_window_layers")
    uses_windows = fields.boolean("use_sliding_window", default=None)
    first = fields.integer("max_window_layers", minimum=0, default=FIRST_SLIDING_LAYER) if uses_windows else num_layers
    if not fields.has("layer_types"):
        default = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    kinds = read_layer_kinds(fields, num_layers, default)
    if uses_windows is False and "sliding_attention" in kinds:
        raise fields.error("use_sliding_window", False, "true, as layer_types has sliding layers")
    choices: list[Choice] = []
    if not fields.has("layer_types"):
        if uses_windows and not fields.has("max_window_layers"):
            choices += default_choices(fields, {"max_window_layers": first})
    elif "sliding_attention" in kinds and uses_windows is None:
        reason = "the file does not say; its layer_types has sliding layers"
        choices.append(Choice(name="use_sliding_window", value="true", reason=reason))
    elif "sliding_attention" not in kinds and first < num_layers:
        choices += layer_types_decide(kinds, {"use_sliding_window": True})
    if uses_windows is not False:
        choices += unused_window(fields, kinds)
    return read_windows(fields, kinds), tuple(choices)


def unused_window(fields: Fields, kinds: Sequence[str]) -> tuple[Choice, ...]:
    """The choice not to use the `sliding_window` of a file without sliding layers; empty if there is nothing unused."""
    is_unused = "sliding_attention" not in kinds and fields.has("sliding_window")
    return (unused(fields, "sliding_window"),) if is_unused else ()


def alternating_window_choices(fields: Fields, kinds: Sequence[str]) -> tuple[Choice, ...]:
    """The choices about the windows of a family whose layers slide by default.

    `kinds` are those of `read_layer_kinds`. Such a family has no `use_sliding_window`. Raises `CheckpointError` for one
    that says something else than the layers.
    """
    slides = "sliding_attention" in kinds
    if fields.boolean("use_sliding_window", default=slides) is not slides:
        allowed = f"{str(slides).lower()}, as there is {types_text(kinds)}"
        raise fields.error("use_sliding_window", not slides, allowed)
    return unused_window(fields, kinds)


def every_sixth_full(num_layers: int, pattern: int = 6) -> tuple[str, ...]:
    """The default layer kinds of Gemma: every `pattern`-th layer has full attention, the others slide."""
    return tuple("sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(num_layers))
