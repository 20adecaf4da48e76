"""The weight recipes of DeepSpec drafts with Gemma 4 layers."""

from __future__ import annotations

from collections.abc import Collection

from dspark_jax.architectures.drafting.block_weights import attention_recipes, block_draft_recipes, mlp_recipes
from dspark_jax.speculators_common.formats.draft_config import DraftConfig
from dspark_jax.speculators_common.formats.recipes import Recipe, copied


def gemma4_draft_recipes(config: DraftConfig, names: Collection[str]) -> dict[str, Recipe]:
    """The recipes of all parameters of `Gemma4DSparkDraft`, for a checkpoint with the tensors `names`."""
    return block_draft_recipes(config, names, layer_recipes=_layer_recipes)


def _layer_recipes(config: DraftConfig, prefix: str) -> dict[str, Recipe]:
    norms = {
        "input_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "pre_feedforward_norm": "pre_feedforward_layernorm",
        "post_feedforward_norm": "post_feedforward_layernorm",
    }
    return {
        **{
            f"{path}.weight": copied(f"{prefix}.{name}.weight", (config.hidden_size,), axes=("hidden",))
            for path, name in norms.items()
        },
        **attention_recipes(config, f"{prefix}.self_attn", "k" if config.k_eq_v else "kv"),
        **mlp_recipes(config, f"{prefix}.mlp"),
        "layer_scalar": copied(f"{prefix}.layer_scalar", (1,), axes=(None,)),
    }
