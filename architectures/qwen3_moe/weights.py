"""The weight recipes of Qwen3 mixture-of-experts targets.

Files have one of two layouts: a tensor for each expert and projection, or one fused tensor for all experts of a layer.
"""

from __future__ import annotations

import functools
from collections.abc import Collection

from dspark_jax.architectures.decoder.dense import DecoderConfig
from dspark_jax.architectures.decoder.weights import RecipesByPath, decoder_recipes, dense_mlp_recipes
from dspark_jax.architectures.qwen3_moe.config import Qwen3MoeConfig
from dspark_jax.speculators_common.formats.recipes import fused_experts, stacked_experts, transposed


def qwen3_moe_recipes(config: Qwen3MoeConfig, names: Collection[str]) -> RecipesByPath:
    """The recipes of all parameters; the tensors `names` of the checkpoint decide the layout of the experts."""
    return decoder_recipes(config, names, functools.partial(_mlp_recipes, names=names))


def _mlp_recipes(config: DecoderConfig, layer: int, prefix: str, *, names: Collection[str]) -> RecipesByPath:
    assert isinstance(config, Qwen3MoeConfig)
    if not config.layer_is_sparse[layer]:
        return dense_mlp_recipes(config, layer, prefix)
    hidden, width = config.hidden_size, config.moe_intermediate_size
    router = transposed(f"{prefix}.mlp.gate.weight", (config.num_experts, hidden), axes=("hidden", None))
    fused = f"{prefix}.mlp.experts"
    if f"{fused}.gate_up_proj" in names or f"{fused}.down_proj" in names:
        return {
            "mlp.router.kernel": router,
            "mlp.gate_up.kernel": fused_experts(
                f"{fused}.gate_up_proj", (config.num_experts, 2 * width, hidden), axes=("experts", "hidden", "mlp")
            ),
            "mlp.down.kernel": fused_experts(
                f"{fused}.down_proj", (config.num_experts, hidden, width), axes=("experts", "mlp", "hidden")
            ),
        }
    experts = [f"{prefix}.mlp.experts.{expert}" for expert in range(config.num_experts)]
    return {
        "mlp.router.kernel": router,
        "mlp.gate_up.kernel": stacked_experts(
            {f"{expert}.{x}_proj.weight": (width, hidden) for expert in experts for x in ("gate", "up")},
            config.num_experts,
            axes=("experts", "hidden", "mlp"),
        ),
        "mlp.down.kernel": stacked_experts(
            {f"{expert}.down_proj.weight": (hidden, width) for expert in experts},
            config.num_experts,
            axes=("experts", "mlp", "hidden"),
        ),
    }
