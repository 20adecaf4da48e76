"""The weight table of the Qwen3 mixture-of-experts line: a file holds every expert's Linears apart."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from dspark_jax.architectures.decoder.dense import DecoderConfig
from dspark_jax.architectures.decoder.weights import RecipeTable, decoder_recipes, dense_mlp_recipes
from dspark_jax.architectures.qwen3_moe.config import Qwen3MoeConfig
from dspark_jax.speculators_common.formats.weight_adapters import Recipe, joined_rows, transposed


def qwen3_moe_recipes(config: Qwen3MoeConfig, names: Collection[str]) -> RecipeTable:
    """One recipe per parameter."""
    return decoder_recipes(config, names, _mlp_recipes)


def _mlp_recipes(config: DecoderConfig, layer: int, prefix: str) -> RecipeTable:
    assert isinstance(config, Qwen3MoeConfig)
    if not config.layer_is_sparse[layer]:
        return dense_mlp_recipes(config, layer, prefix)
    hidden, width = config.hidden_size, config.moe_intermediate_size
    experts = [f"{prefix}.mlp.experts.{expert}" for expert in range(config.num_experts)]
    return {
        "mlp.router.kernel": transposed(f"{prefix}.mlp.gate.weight", (config.num_experts, hidden)),
        "mlp.gate_up.kernel": _stacked(
            {f"{expert}.{x}_proj.weight": (width, hidden) for expert in experts for x in ("gate", "up")}, per_expert=2
        ),
        "mlp.down.kernel": _stacked(
            {f"{expert}.down_proj.weight": (hidden, width) for expert in experts}, per_expert=1
        ),
    }


def _stacked(shapes: dict[str, tuple[int, int]], *, per_expert: int) -> Recipe:
    """Linears `[out, in]`, `per_expert` of them for each expert, as one array `[E, in, sum of outs]`."""

    def assemble(tensors: Sequence[np.ndarray]) -> np.ndarray:
        # One copy: rows lie end to end as wanted, only the view is transposed.
        rows = joined_rows(tensors)
        return rows.reshape(len(tensors) // per_expert, -1, rows.shape[1]).swapaxes(1, 2)

    return Recipe(tensors=shapes, assemble=assemble)
