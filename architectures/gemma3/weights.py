"""The weight recipes of Gemma 3."""

from __future__ import annotations

from collections.abc import Collection

from dspark_jax.architectures.decoder.text_part import head_name, ignored_text_tensors, text_prefix
from dspark_jax.architectures.decoder.weights import RecipesByPath, attention_recipes, gated_mlp_recipes, token_recipes
from dspark_jax.architectures.gemma3.config import Gemma3Config
from dspark_jax.speculators_common.formats.recipes import copied


def gemma3_recipes(config: Gemma3Config, names: Collection[str]) -> RecipesByPath:
    """The recipes of all parameters of the text model, for a checkpoint with the tensors `names`."""
    prefix, hidden = text_prefix(names), config.hidden_size
    recipes = token_recipes(
        config.vocab_size, hidden, names, tied=config.tie_word_embeddings, prefix=prefix, head=head_name(names)
    )
    recipes["norm.weight"] = copied(f"{prefix}norm.weight", (hidden,), axes=("hidden",))
    for layer in range(config.num_hidden_layers):
        layer_recipes = _layer_recipes(config, f"{prefix}layers.{layer}")
        recipes |= {f"layers.{layer}.{path}": recipe for path, recipe in layer_recipes.items()}
    return recipes


def gemma3_ignored(config: Gemma3Config) -> tuple[str, ...]:
    """Names of tensors to ignore: those of other towers, and the stored copy of a tied head."""
    return ignored_text_tensors(has_towers=config.has_towers, tied=config.tie_word_embeddings)


def _layer_recipes(config: Gemma3Config, prefix: str) -> RecipesByPath:
    norms = {
        "input_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "pre_feedforward_norm": "pre_feedforward_layernorm",
        "post_feedforward_norm": "post_feedforward_layernorm",
    }
    return {
        **attention_recipes(config, prefix),
        **gated_mlp_recipes(f"{prefix}.mlp", config.hidden_size, config.intermediate_size),
        **{
            f"{path}.weight": copied(f"{prefix}.{name}.weight", (config.hidden_size,), axes=("hidden",))
            for path, name in norms.items()
        },
    }
