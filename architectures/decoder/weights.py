"""The weight recipes of a decoder in the Hugging Face layout.

Tensors have names such as `model.layers.0.self_attn.q_proj.weight`, and the weight of a Linear is `[out, in]`. Every
function here returns recipes by the dotted path of the module's parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from dspark_jax.architectures.decoder.dense import DecoderConfig
from dspark_jax.speculators_common.formats.recipes import (
    Recipe,
    copied,
    joined_biases,
    stacked_columns,
    transposed,
)

RecipesByPath = dict[str, Recipe]


def dense_mlp_recipes(config: DecoderConfig, layer: int, prefix: str) -> RecipesByPath:
    """The recipes of a dense layer's feed-forward part; parameter paths are relative to the layer."""
    return gated_mlp_recipes(f"{prefix}.mlp", config.hidden_size, config.intermediate_size, bias=config.mlp_bias)


def decoder_recipes(
    config: DecoderConfig,
    names: Collection[str],
    mlp: Callable[[DecoderConfig, int, str], RecipesByPath] = dense_mlp_recipes,
) -> RecipesByPath:
    """The recipes of all parameters, for a checkpoint with the tensors `names`.

    `mlp(config, layer, prefix)` returns the recipes of a layer's feed-forward part, with paths relative to the layer.
    """
    recipes = token_recipes(config.vocab_size, config.hidden_size, names, tied=config.tie_word_embeddings)
    recipes["norm.weight"] = copied("model.norm.weight", (config.hidden_size,), axes=("hidden",))
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        layer_recipes = {
            "input_norm.weight": copied(f"{prefix}.input_layernorm.weight", (config.hidden_size,), axes=("hidden",)),
            "post_attention_norm.weight": copied(
                f"{prefix}.post_attention_layernorm.weight", (config.hidden_size,), axes=("hidden",)
            ),
            **attention_recipes(config, prefix),
            **mlp(config, layer, prefix),
        }
        recipes |= {f"layers.{layer}.{path}": recipe for path, recipe in layer_recipes.items()}
    return recipes


def token_recipes(
    vocab_size: int,
    hidden_size: int,
    names: Collection[str],
    *,
    tied: bool,
    prefix: str = "model.",
    head: str = "lm_head.weight",
) -> RecipesByPath:
    """The recipes of the embedding and the head.

    An untied head is read from the tensor `head`. A tied head is read from the embedding's tensor. If a tied file
    stores only the head, both are read from that.
    """
    shape = (vocab_size, hidden_size)
    embedding = f"{prefix}embed_tokens.weight"
    if tied and embedding not in names and head in names:
        embedding = head
    return {
        "table.rows": copied(embedding, shape, axes=("vocab", "hidden")),
        "head.kernel": transposed(embedding if tied else head, shape, axes=("hidden", "vocab")),
    }


def attention_recipes(config: DecoderConfig, prefix: str) -> RecipesByPath:
    """The recipes of a layer's attention; `prefix` begins the tensor names, paths are relative to the layer."""
    hidden, attention = config.hidden_size, f"{prefix}.self_attn"
    rows = {"q": config.num_attention_heads * config.head_dim, "k": config.num_key_value_heads * config.head_dim}
    rows["v"] = rows["k"]
    recipes = {
        "attention.qkv.kernel": stacked_columns(
            {f"{attention}.{x}_proj.weight": (rows[x], hidden) for x in "qkv"}, axes=("hidden", "heads")
        ),
        "attention.output.kernel": transposed(
            f"{attention}.o_proj.weight", (hidden, rows["q"]), axes=("heads", "hidden")
        ),
    }
    if config.use_qk_norm:
        recipes["attention.query_norm.weight"] = copied(f"{attention}.q_norm.weight", (config.head_dim,), axes=(None,))
        recipes["attention.key_norm.weight"] = copied(f"{attention}.k_norm.weight", (config.head_dim,), axes=(None,))
    if config.attention_bias:
        recipes["attention.qkv.bias"] = joined_biases(
            {f"{attention}.{x}_proj.bias": (rows[x],) for x in "qkv"}, axes=("heads",)
        )
    if config.output_bias:
        recipes["attention.output.bias"] = copied(f"{attention}.o_proj.bias", (hidden,), axes=("hidden",))
    return recipes


def gated_mlp_recipes(mlp: str, hidden: int, width: int, *, bias: bool = False) -> RecipesByPath:
    """The recipes of a layer's `GatedMLP`, relative to the layer; `mlp` is the name prefix of its three Linears."""
    recipes = {
        "mlp.gate_up.kernel": stacked_columns(
            {f"{mlp}.{x}_proj.weight": (width, hidden) for x in ("gate", "up")}, axes=("hidden", "mlp")
        ),
        "mlp.down.kernel": transposed(f"{mlp}.down_proj.weight", (hidden, width), axes=("mlp", "hidden")),
    }
    if bias:
        recipes["mlp.gate_up.bias"] = joined_biases(
            {f"{mlp}.{x}_proj.bias": (width,) for x in ("gate", "up")}, axes=("mlp",)
        )
        recipes["mlp.down.bias"] = copied(f"{mlp}.down_proj.bias", (hidden,), axes=("hidden",))
    return recipes


def ignored_tensors(config: DecoderConfig) -> tuple[str, ...]:
    """Names of tensors to ignore: the stored copy of a tied head, and the rotation frequencies in old files."""
    copies = ("lm_head.weight",) if config.tie_word_embeddings else ()
    return (
        *copies,
        *(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(config.num_hidden_layers)),
    )
