"""The weight table of a block draft: the tensor names that the speculators and the DeepSpec formats share
(`docs/formats.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from dspark_jax.architectures.drafting.tables import tables_of
from dspark_jax.speculators_common.formats.draft_config import DraftConfig
from dspark_jax.speculators_common.formats.weight_adapters import (
    Recipe,
    copied,
    joined_biases,
    stacked_columns,
    transposed,
)
from dspark_jax.speculators_common.heads.vocab_map import target_id_table

LayerRecipes = Callable[[DraftConfig, str], dict[str, Recipe]]


def block_draft_recipes(
    config: DraftConfig, names: Collection[str], *, layer_recipes: LayerRecipes | None = None
) -> dict[str, Recipe]:
    """One recipe per parameter of `BlockDraft`. A head made of target rows comes under the checkpoint's own name,
    `lm_head.weight`.

    `layer_recipes(config, prefix)` is the table of one layer, that of the Qwen3 style by default.
    """
    hidden = config.hidden_size
    tables = tables_of(config, names)
    recipes = {
        "fc.kernel": transposed("fc.weight", (hidden, config.num_taps * config.target_hidden_size)),
        "hidden_norm.weight": copied("hidden_norm.weight", (hidden,)),
        "norm.weight": copied("norm.weight", (hidden,)),
        **_vocab_recipes(config, names),
        **_markov_recipes(config),
        **_confidence_recipes(config, names),
    }
    if tables.embed_tokens == "own":
        recipes["table.rows"] = copied("embed_tokens.weight", (config.vocab_size, hidden))
    if tables.lm_head != "target":
        recipes["head.kernel"] = _first_columns(
            "lm_head.weight", (config.draft_vocab_size, hidden), config.num_draft_ids
        )
    for layer in range(config.num_hidden_layers):
        recipes |= {
            f"layers.{layer}.{path}": recipe
            for path, recipe in (layer_recipes or qwen3_layer_recipes)(config, f"layers.{layer}").items()
        }
    return recipes


def qwen3_layer_recipes(config: DraftConfig, prefix: str) -> dict[str, Recipe]:
    """The parameters of `BlockLayer`."""
    hidden = config.hidden_size
    return {
        "input_norm.weight": copied(f"{prefix}.input_layernorm.weight", (hidden,)),
        "post_attention_norm.weight": copied(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        **attention_recipes(config, f"{prefix}.self_attn", "kv"),
        **mlp_recipes(config, f"{prefix}.mlp"),
    }


def attention_recipes(config: DraftConfig, attention: str, key_values: str) -> dict[str, Recipe]:
    """The parameters of `BlockAttention`; `key_values` are the projections that make its key/value kernel."""
    hidden = config.hidden_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    recipes = {
        "attention.query.kernel": transposed(f"{attention}.q_proj.weight", (queries, hidden)),
        "attention.key_value.kernel": stacked_columns(
            {f"{attention}.{x}_proj.weight": (keys, hidden) for x in key_values}
        ),
        "attention.output.kernel": transposed(f"{attention}.o_proj.weight", (hidden, queries)),
        "attention.query_norm.weight": copied(f"{attention}.q_norm.weight", (config.head_dim,)),
        "attention.key_norm.weight": copied(f"{attention}.k_norm.weight", (config.head_dim,)),
    }
    if config.attention_bias:
        recipes["attention.query.bias"] = copied(f"{attention}.q_proj.bias", (queries,))
        recipes["attention.key_value.bias"] = joined_biases({f"{attention}.{x}_proj.bias": (keys,) for x in key_values})
        recipes["attention.output.bias"] = copied(f"{attention}.o_proj.bias", (hidden,))
    return recipes


def mlp_recipes(config: DraftConfig, mlp: str) -> dict[str, Recipe]:
    """The parameters of `GatedMLP`."""
    hidden, width = config.hidden_size, config.intermediate_size
    return {
        "mlp.gate_up.kernel": stacked_columns({f"{mlp}.{x}_proj.weight": (width, hidden) for x in ("gate", "up")}),
        "mlp.down.kernel": transposed(f"{mlp}.down_proj.weight", (hidden, width)),
    }


def _markov_recipes(config: DraftConfig) -> dict[str, Recipe]:
    if config.markov_head_type == "none":
        return {}
    rank, hidden = config.markov_rank, config.hidden_size
    recipes = {
        "markov_head.w1": copied("markov_head.markov_w1.weight", (config.vocab_size, rank)),
        "markov_head.w2.kernel": _first_columns(
            "markov_head.markov_w2.weight", (config.draft_vocab_size, rank), config.num_draft_ids
        ),
    }
    if config.markov_head_type == "gated":
        recipes["markov_head.gate.kernel"] = transposed("markov_head.gate_proj.weight", (rank, hidden + rank))
        recipes["markov_head.gate.bias"] = copied("markov_head.gate_proj.bias", (rank,))
    if config.markov_head_type == "rnn":
        recipes["markov_head.joint.kernel"] = transposed("markov_head.joint_proj.weight", (3 * rank, 2 * rank + hidden))
        recipes["markov_head.joint.bias"] = copied("markov_head.joint_proj.bias", (3 * rank,))
    return recipes


def _confidence_recipes(config: DraftConfig, names: Collection[str]) -> dict[str, Recipe]:
    if not config.enable_confidence_head:
        return {}
    width = config.hidden_size + (config.markov_rank if config.confidence_head_with_markov else 0)
    kernel = transposed("confidence_head.proj.weight", (1, width))
    bias = copied("confidence_head.proj.bias", (1,))
    if "confidence_head.proj.bias" not in names:
        bias = Recipe(tensors={}, assemble=lambda tensors: np.zeros((1,), np.float32))
    return {"confidence_head.projection.kernel": kernel, "confidence_head.projection.bias": bias}


def _vocab_recipes(config: DraftConfig, names: Collection[str]) -> dict[str, Recipe]:
    """The d2t/t2d pair, validated where it is read. A full vocabulary that brings the identity all the same is checked
    and leaves no parameter.
    """
    shapes: Mapping[str, tuple[int, ...]] = {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    present = {name: shape for name, shape in shapes.items() if name in names}
    if not present and not config.is_pruned:
        return {}

    def absolute_ids(tensors: Sequence[np.ndarray]) -> np.ndarray:
        stored = dict(zip(present, tensors, strict=True))
        table = target_id_table(
            vocab_size=config.vocab_size,
            draft_vocab_size=config.draft_vocab_size,
            file=Path(config.source).parent,  # where the tensors are
            d2t=stored.get("d2t"),
            t2d=stored.get("t2d"),
        )
        return np.arange(config.num_draft_ids, dtype=np.int32) if table is None else np.asarray(table)

    return {"draft_to_target": Recipe(tensors=present, assemble=absolute_ids, is_floating=False)}


def _first_columns(name: str, shape: tuple[int, int], count: int) -> Recipe:
    """A Linear onto the draft vocabulary, transposed, without the padding ids beyond the target's vocabulary, which
    must never be proposed.
    """
    return Recipe(tensors={name: shape}, assemble=lambda tensors: tensors[0][:count].T)
