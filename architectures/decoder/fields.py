"""Reading the `config.json` of a decoder; what the target families share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dspark_jax.architectures.decoder.recurrent_state import refuse_recurrent_layers
from dspark_jax.speculators_common.formats.fields import Fields
from dspark_jax.speculators_common.formats.quantised import refuse_quantised
from dspark_jax.speculators_common.formats.rope.fields import parse_rope, theta_choice, usable_length
from dspark_jax.speculators_common.formats.size_limits import MAX_LAYERS, MAX_SIZE
from dspark_jax.speculators_common.formats.unknown_fields import unknown_fields

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
    "temperature",  # of sampled text, as old files state it here
    "output_attentions",
    "output_hidden_states",
    "is_llama_config",
    "_name_or_path",
    "transformers.js_config",
]
# What they mean that is true of every target here.
_NEUTRAL_FIELDS: Mapping[str, tuple[Any, ...]] = {"is_decoder": (True, False), "is_causal": (True,)}
THETA = 10_000.0  # of a file that does not say


def read_decoder_geometry(
    fields: Fields, defaults: Mapping[str, int] | None = None, required: Collection[str] = ()
) -> dict[str, Any]:
    """The `DecoderConfig` fields that every silu decoder with one rotation states; `defaults` and `required` as in
    `read_decoder_sizes`.
    """
    require_activation(fields, "silu", "hidden_act")
    sizes = read_decoder_sizes(fields, defaults, required)
    rope = parse_rope(fields, head_dim=sizes["head_dim"], default_theta=THETA)
    return {
        **sizes,
        "max_position_embeddings": usable_length(sizes["max_position_embeddings"], rope, fields.file),
        "intermediate_size": fields.integer("intermediate_size", minimum=1, maximum=MAX_SIZE),
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", default=False),
        "rope": rope,
        "choices": theta_choice(fields, ("full_attention",), rope.theta),
    }


def read_decoder_sizes(
    fields: Fields, defaults: Mapping[str, int] | None = None, required: Collection[str] = ()
) -> dict[str, Any]:
    """The `DecoderConfig` fields that every decoder states.

    `defaults` are the sizes that a file of this family may leave out. Unless they are among them, `head_dim` defaults
    to hidden size over heads, and `num_key_value_heads` to the number of heads if the family does not name it in
    `required`.
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
    """The feed-forward activation, stated under any of `names` or not at all, must be the family's."""
    for name in names:
        if fields.string(name, default=supported) != supported:
            raise fields.error(name, fields.string(name), supported)


def read_layer_kinds(fields: Fields, num_layers: int, default: Sequence[str]) -> tuple[str, ...]:
    """`full_attention` or `sliding_attention` per layer."""
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
    """Sliding window per layer, `None` = full attention. A window without sliding layers has no meaning."""
    if "sliding_attention" not in kinds:
        fields.ignore("sliding_window")
        return (None,) * len(kinds)
    is_left_out = default_window is not None and not fields.has("sliding_window")
    window = default_window if is_left_out else fields.integer("sliding_window", minimum=1)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def unknown_target_fields(
    fields: Fields, whole: Fields | None = None, neutral: Mapping[str, tuple[Any, ...]] | None = None
) -> tuple[str, ...]:
    """The stated fields of a target that nobody read; see `unknown_fields`, which says what is refused.

    `whole` is the file around the text model in `fields`, where there is one: of it only what stands beside the parts
    (`text_config`, `vision_config`, ...) could speak of the text model. `neutral` are names of the family, each with
    the values that say what is true of it anyway.
    """
    known = {**_NEUTRAL_FIELDS, **(neutral or {})}
    if whole is not None and whole.raw is not fields.raw:
        parts = [name for name in whole.raw if name.endswith("_config")]
        unknown_fields(whole, [*HARMLESS_FIELDS, *parts], known)
    return unknown_fields(fields, (), known)


def require_full_layers(fields: Fields, num_layers: int) -> None:
    """Refuse windows in a family whose layers have none; a width that `use_sliding_window` or `layer_types` leaves
    unused may be stated.
    """
    windows = read_layer_windows(fields, num_layers)
    if any(window is not None for window in windows):
        name = "layer_types" if fields.has("layer_types") else "use_sliding_window"
        raise fields.error(name, fields.raw.get(name), "full_attention layers: the family has no windows")
    if fields.has("sliding_window") and not (fields.has("use_sliding_window") or fields.has("layer_types")):
        raise fields.error("sliding_window", fields.raw["sliding_window"], "null: the family has no windows")


def read_layer_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Sliding window per layer, `None` = full attention.

    Files without `layer_types` say it by `use_sliding_window`, which spares the first `max_window_layers` layers.
    """
    default = ["full_attention"] * num_layers
    fields.ignore("max_window_layers")
    uses_windows = fields.boolean("use_sliding_window", default=None)
    if uses_windows and not fields.has("layer_types"):
        first = fields.integer("max_window_layers", minimum=0)
        default = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    kinds = read_layer_kinds(fields, num_layers, default)
    if uses_windows is False and "sliding_attention" in kinds:
        raise fields.error("use_sliding_window", False, "true, as layer_types has sliding layers")
    return read_windows(fields, kinds)


def every_sixth_full(num_layers: int, pattern: int = 6) -> tuple[str, ...]:
    """Gemma's default mix: every `pattern`-th layer is full, the others slide."""
    return tuple("sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(num_layers))
