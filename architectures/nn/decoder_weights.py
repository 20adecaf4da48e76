"""The weight table of a dense decoder in the Hugging Face layout (`model.layers.0.self_attn.q_proj.weight`, Linear `[out, in]`)."""

from __future__ import annotations

from collections.abc import Collection

from dspark_jax.architectures.nn.decoder import DecoderConfig
from dspark_jax.speculators_common.weight_adapters import Recipe, copied, joined_biases, stacked_columns, transposed


def decoder_recipes(config: DecoderConfig, names: Collection[str]) -> dict[str, Recipe]:
    """One recipe per parameter. A tied head is made from the embedding; an untied one has a tensor of its own."""
    embedding = copied("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
    head_name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    head = transposed(head_name, (config.vocab_size, config.hidden_size))
    recipes = {"table.rows": embedding, "head.kernel": head, "norm.weight": copied("model.norm.weight", (config.hidden_size,))}
    for layer in range(config.num_hidden_layers):
        table = layer_recipes(config, f"model.layers.{layer}")
        recipes |= {f"layers.{layer}.{path}": recipe for path, recipe in table.items()}
    return recipes


def layer_recipes(config: DecoderConfig, prefix: str) -> dict[str, Recipe]:
    """The parameters of one decoder layer, relative to the layer."""
    hidden, width = config.hidden_size, config.intermediate_size
    rows = {"q": config.num_attention_heads * config.head_dim, "k": config.num_key_value_heads * config.head_dim}
    rows["v"] = rows["k"]
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    recipes = {
        "input_norm.weight": copied(f"{prefix}.input_layernorm.weight", (hidden,)),
        "post_attention_norm.weight": copied(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        "attention.qkv.kernel": stacked_columns({f"{attention}.{x}_proj.weight": (rows[x], hidden) for x in "qkv"}),
        "attention.output.kernel": transposed(f"{attention}.o_proj.weight", (hidden, rows["q"])),
        "mlp.gate_up.kernel": stacked_columns({f"{mlp}.{x}_proj.weight": (width, hidden) for x in ("gate", "up")}),
        "mlp.down.kernel": transposed(f"{mlp}.down_proj.weight", (hidden, width)),
    }
    if config.use_qk_norm:
        recipes["attention.query_norm.weight"] = copied(f"{attention}.q_norm.weight", (config.head_dim,))
        recipes["attention.key_norm.weight"] = copied(f"{attention}.k_norm.weight", (config.head_dim,))
    if config.attention_bias:
        recipes["attention.qkv.bias"] = joined_biases({f"{attention}.{x}_proj.bias": (rows[x],) for x in "qkv"})
    if config.output_bias:
        recipes["attention.output.bias"] = copied(f"{attention}.o_proj.bias", (hidden,))
    if config.mlp_bias:
        recipes["mlp.gate_up.bias"] = joined_biases({f"{mlp}.{x}_proj.bias": (width,) for x in ("gate", "up")})
        recipes["mlp.down.bias"] = copied(f"{mlp}.down_proj.bias", (hidden,))
    return recipes


def ignored_tensors(config: DecoderConfig) -> tuple[str, ...]:
    """Names that may be present without use: the copy of a tied head, and frequency buffers of old exports (both follow from the config)."""
    copies = ("lm_head.weight",) if config.tie_word_embeddings else ()
    return (*copies, *(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(config.num_hidden_layers)))
