"""The weight recipes of Gemma 4."""

from __future__ import annotations

from collections.abc import Collection

from dspark_jax.architectures.decoder.text_part import TEXT_PREFIXES, head_name, ignored_text_tensors, text_prefix
from dspark_jax.architectures.decoder.weights import RecipesByPath, gated_mlp_recipes, token_recipes
from dspark_jax.architectures.gemma4.config import Gemma4Config
from dspark_jax.speculators_common.formats.recipes import copied, stacked_columns, transposed


def gemma4_recipes(config: Gemma4Config, names: Collection[str]) -> RecipesByPath:
    """The recipes of all parameters of the text model, for a checkpoint with the tensors `names`."""
    prefix, hidden = text_prefix(names), config.hidden_size
    recipes = token_recipes(
        config.vocab_size, hidden, names, tied=config.tie_word_embeddings, prefix=prefix, head=head_name(names)
    )
    recipes["norm.weight"] = copied(f"{prefix}norm.weight", (hidden,), axes=("hidden",))
    if config.per_layer_input_size:
        width = config.num_hidden_layers * config.per_layer_input_size
        recipes |= {
            "per_layer_inputs.table.rows": copied(
                f"{prefix}embed_tokens_per_layer.weight",
                (config.per_layer_vocab_size, width),
                axes=("vocab", "per_layer"),
            ),
            "per_layer_inputs.projection.kernel": transposed(
                f"{prefix}per_layer_model_projection.weight", (width, hidden), axes=("hidden", "per_layer")
            ),
            "per_layer_inputs.norm.weight": copied(
                f"{prefix}per_layer_projection_norm.weight", (config.per_layer_input_size,), axes=(None,)
            ),
        }
    for layer in range(config.num_hidden_layers):
        layer_recipes = _layer_recipes(config, layer, f"{prefix}layers.{layer}")
        recipes |= {f"layers.{layer}.{path}": recipe for path, recipe in layer_recipes.items()}
    return recipes


def gemma4_ignored(config: Gemma4Config) -> tuple[str, ...]:
    """Names of tensors to ignore: those of other towers, the stored copy of a tied head, and unused projections.

    A layer that reads the keys and values of an earlier layer uses no key and value projections, but some files store
    them.
    """
    readers = [layer for layer, shape in enumerate(config.layers) if not shape.stores_kv]
    unused = (
        f"{prefix}layers.{layer}.self_attn.{name}.weight"
        for layer in readers
        for name in ("k_proj", "v_proj", "k_norm", "v_norm")
        for prefix in TEXT_PREFIXES
    )
    return (*ignored_text_tensors(has_towers=config.has_towers, tied=config.tie_word_embeddings), *unused)


def _layer_recipes(config: Gemma4Config, layer: int, prefix: str) -> RecipesByPath:
    hidden, shape = config.hidden_size, config.layers[layer]
    norms = {
        "input_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "pre_feedforward_norm": "pre_feedforward_layernorm",
        "post_feedforward_norm": "post_feedforward_layernorm",
    }
    recipes = {
        **{
            f"{path}.weight": copied(f"{prefix}.{name}.weight", (hidden,), axes=("hidden",))
            for path, name in norms.items()
        },
        **_attention_recipes(config, layer, f"{prefix}.self_attn"),
        **gated_mlp_recipes(f"{prefix}.mlp", hidden, shape.intermediate_size),
        "scalar": copied(f"{prefix}.layer_scalar", (1,), axes=(None,)),
    }
    if config.per_layer_input_size:
        size = config.per_layer_input_size
        recipes |= {
            "per_layer_gate.gate.kernel": transposed(
                f"{prefix}.per_layer_input_gate.weight", (size, hidden), axes=("hidden", "per_layer")
            ),
            "per_layer_gate.projection.kernel": transposed(
                f"{prefix}.per_layer_projection.weight", (hidden, size), axes=("per_layer", "hidden")
            ),
            "per_layer_gate.norm.weight": copied(
                f"{prefix}.post_per_layer_input_norm.weight", (hidden,), axes=("hidden",)
            ),
        }
    return recipes


def _attention_recipes(config: Gemma4Config, layer: int, attention: str) -> RecipesByPath:
    hidden, shape = config.hidden_size, config.layers[layer]
    queries, keys = config.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    rows = {"q": queries}
    if shape.stores_kv:
        rows |= {"k": keys} if shape.value_is_key else {"k": keys, "v": keys}
    recipes = {
        "attention.qkv.kernel": stacked_columns(
            {f"{attention}.{x}_proj.weight": (rows[x], hidden) for x in rows}, axes=("hidden", "heads")
        ),
        "attention.output.kernel": transposed(
            f"{attention}.o_proj.weight", (hidden, queries), axes=("heads", "hidden")
        ),
        "attention.query_norm.weight": copied(f"{attention}.q_norm.weight", (shape.head_dim,), axes=(None,)),
    }
    if shape.stores_kv:
        recipes["attention.key_norm.weight"] = copied(f"{attention}.k_norm.weight", (shape.head_dim,), axes=(None,))
    return recipes
