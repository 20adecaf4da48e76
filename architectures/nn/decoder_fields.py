"""Reading the `config.json` of a dense decoder; what the Llama and Qwen3 lines share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspark_jax.speculators_common.fields import Fields
from dspark_jax.speculators_common.rope_fields import parse_rope

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
    "max_window_layers",
    "output_attentions",
    "output_hidden_states",
    "is_llama_config",
    "_name_or_path",
    "rope_interleaved",
    "transformers.js_config",
]


def read_decoder_geometry(fields: Fields) -> dict[str, Any]:
    """The `DecoderConfig` fields that every dense decoder states; `head_dim` defaults to hidden size over heads, as the format has it."""
    hidden_size = fields.integer("hidden_size", minimum=1)
    num_heads = fields.integer("num_attention_heads", minimum=1)
    num_kv_heads = fields.integer("num_key_value_heads", minimum=1, default=num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads {num_heads}")
    head_dim = fields.integer("head_dim", minimum=2, default=None)
    if head_dim is None and hidden_size % num_heads:
        raise fields.missing("head_dim", f"an integer, as hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}")
    head_dim = head_dim or hidden_size // num_heads
    activation = fields.string("hidden_act", default="silu")
    if activation != "silu":
        raise fields.error("hidden_act", activation, "silu")
    fields.ignore(*HARMLESS_FIELDS)
    return {
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("intermediate_size", minimum=1),
        "num_hidden_layers": fields.integer("num_hidden_layers", minimum=1),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("rms_norm_eps", above=0, default=1e-6),
        "vocab_size": fields.integer("vocab_size", minimum=1),
        "max_position_embeddings": fields.integer("max_position_embeddings", minimum=1),
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", default=False),
        "rope": parse_rope(fields, head_dim=head_dim),
    }


def read_layer_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Sliding window per layer, `None` = full attention. A window without `use_sliding_window` or sliding layers has no meaning."""
    kinds: Sequence[str] = fields.string_list("layer_types", default=("full_attention",) * num_layers)
    unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if unknown or len(kinds) != num_layers:
        raise fields.error("layer_types", unknown[0] if unknown else list(kinds), f"{num_layers} entries of full_attention or sliding_attention")
    fields.ignore("use_sliding_window")
    if "sliding_attention" not in kinds:
        fields.ignore("sliding_window")
        return (None,) * num_layers
    window = fields.integer("sliding_window", minimum=1)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
