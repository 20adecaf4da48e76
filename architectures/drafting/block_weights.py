"""The weight recipes of a block draft. The speculators and DeepSpec formats use the same tensor names.

`docs/formats.md` lists the tensors. Every function here returns recipes by the dotted path of the module's parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from dspark_jax.architectures.drafting.tables import tables_of
from dspark_jax.speculators_common.formats.draft_config import DraftConfig
from dspark_jax.speculators_common.formats.recipes import (
    AxisName,
    Recipe,
    constant,
    copied,
    joined_biases,
    stacked_columns,
    transposed,
)
from dspark_jax.speculators_common.heads.vocab_map import target_id_table, vocabulary_tensors

LayerRecipes = Callable[[DraftConfig, str], dict[str, Recipe]]
"""`(config, prefix)` -> recipes of one layer, relative to it; `prefix` begins the names of its tensors."""


def block_draft_recipes(
    config: DraftConfig, names: Collection[str], *, layer_recipes: LayerRecipes | None = None
) -> dict[str, Recipe]:
    """The recipes of all parameters of `BlockDraft`, for a checkpoint with the tensors `names`.

    A head that consists of rows of the target's head is read from the name `lm_head.weight`, too. `layer_recipes` are
    those of the Qwen3 style by default.
    """
    hidden = config.hidden_size
    tables = tables_of(config, names)
    recipes = {
        "fc.kernel": transposed(
            "fc.weight", (hidden, config.num_taps * config.target_hidden_size), axes=("taps", "hidden")
        ),
        "hidden_norm.weight": copied("hidden_norm.weight", (hidden,), axes=("hidden",)),
        "norm.weight": copied("norm.weight", (hidden,), axes=("hidden",)),
        **_vocab_recipes(config, names),
        **_markov_recipes(config),
        **_confidence_recipes(config, names),
    }
    if tables.embed_tokens == "own":
        recipes["table.rows"] = copied("embed_tokens.weight", (config.vocab_size, hidden), axes=("vocab", "hidden"))
    if tables.lm_head != "target":
        recipes["head.kernel"] = _draft_vocab_kernel(config, "lm_head.weight", hidden, axis="hidden")
    for layer in range(config.num_hidden_layers):
        recipes |= {
            f"layers.{layer}.{path}": recipe
            for path, recipe in (layer_recipes or qwen3_layer_recipes)(config, f"layers.{layer}").items()
        }
    return recipes


def qwen3_layer_recipes(config: DraftConfig, prefix: str) -> dict[str, Recipe]:
    """The recipes of one `BlockLayer`, relative to the layer."""
    hidden = config.hidden_size
    return {
        "input_norm.weight": copied(f"{prefix}.input_layernorm.weight", (hidden,), axes=("hidden",)),
        "post_attention_norm.weight": copied(f"{prefix}.post_attention_layernorm.weight", (hidden,), axes=("hidden",)),
        **attention_recipes(config, f"{prefix}.self_attn", "kv"),
        **mlp_recipes(config, f"{prefix}.mlp"),
    }


def attention_recipes(config: DraftConfig, attention: str, key_values: str) -> dict[str, Recipe]:
    """The recipes of a layer's `BlockAttention`, relative to the layer.

    `attention` begins the names of its tensors. `key_values` names the projections of the key/value kernel: `kv`, or
    `k` if values are keys.
    """
    hidden = config.hidden_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    recipes = {
        "attention.query.kernel": transposed(f"{attention}.q_proj.weight", (queries, hidden), axes=("hidden", "heads")),
        "attention.key_value.kernel": stacked_columns(
            {f"{attention}.{x}_proj.weight": (keys, hidden) for x in key_values}, axes=("hidden", "kv_heads")
        ),
        "attention.output.kernel": transposed(
            f"{attention}.o_proj.weight", (hidden, queries), axes=("heads", "hidden")
        ),
        "attention.query_norm.weight": copied(f"{attention}.q_norm.weight", (config.head_dim,), axes=(None,)),
        "attention.key_norm.weight": copied(f"{attention}.k_norm.weight", (config.head_dim,), axes=(None,)),
    }
    if config.attention_bias:
        recipes["attention.query.bias"] = copied(f"{attention}.q_proj.bias", (queries,), axes=("heads",))
        recipes["attention.key_value.bias"] = joined_biases(
            {f"{attention}.{x}_proj.bias": (keys,) for x in key_values}, axes=("kv_heads",)
        )
        recipes["attention.output.bias"] = copied(f"{attention}.o_proj.bias", (hidden,), axes=("hidden",))
    return recipes


def mlp_recipes(config: DraftConfig, mlp: str) -> dict[str, Recipe]:
    """The recipes of a layer's `GatedMLP`, relative to the layer; `mlp` begins the names of its tensors."""
    hidden, width = config.hidden_size, config.intermediate_size
    return {
        "mlp.gate_up.kernel": stacked_columns(
            {f"{mlp}.{x}_proj.weight": (width, hidden) for x in ("gate", "up")}, axes=("hidden", "mlp")
        ),
        "mlp.down.kernel": transposed(f"{mlp}.down_proj.weight", (hidden, width), axes=("mlp", "hidden")),
    }


def _markov_recipes(config: DraftConfig) -> dict[str, Recipe]:
    if config.markov_head_type == "none":
        return {}
    rank, hidden = config.markov_rank, config.hidden_size
    recipes = {
        "markov_head.w1": copied("markov_head.markov_w1.weight", (config.vocab_size, rank), axes=("vocab", "rank")),
        "markov_head.w2.kernel": _draft_vocab_kernel(config, "markov_head.markov_w2.weight", rank, axis="rank"),
    }
    if config.markov_head_type == "gated":
        recipes["markov_head.gate.kernel"] = transposed(
            "markov_head.gate_proj.weight", (rank, hidden + rank), axes=(None, "rank")
        )
        recipes["markov_head.gate.bias"] = copied("markov_head.gate_proj.bias", (rank,), axes=("rank",))
    if config.markov_head_type == "rnn":
        recipes["markov_head.joint.kernel"] = transposed(
            "markov_head.joint_proj.weight", (3 * rank, 2 * rank + hidden), axes=(None, "rank")
        )
        recipes["markov_head.joint.bias"] = copied("markov_head.joint_proj.bias", (3 * rank,), axes=("rank",))
    return recipes


def _confidence_recipes(config: DraftConfig, names: Collection[str]) -> dict[str, Recipe]:
    if not config.enable_confidence_head:
        return {}
    width = config.hidden_size + (config.markov_rank if config.confidence_head_with_markov else 0)
    bias = copied("confidence_head.proj.bias", (1,), axes=(None,))
    if "confidence_head.proj.bias" not in names:
        bias = constant(np.zeros((1,), np.float32), axes=(None,))
    return {
        "confidence_head.projection.kernel": transposed("confidence_head.proj.weight", (1, width), axes=(None, None)),
        "confidence_head.projection.bias": bias,
    }


def _vocab_recipes(config: DraftConfig, names: Collection[str]) -> dict[str, Recipe]:
    """The recipe of the draft vocabulary from the tensors `d2t` and `t2d`, which are checked when they are read.

    A draft with the full vocabulary may store them too. They must then be the identity, and the module has no parameter
    for them.
    """
    shapes: Mapping[str, tuple[int, ...]] = {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    present = {name: shape for name, shape in shapes.items() if name in names}
    if not present and not config.is_pruned:
        return {}

    def assemble(tensors: Sequence[np.ndarray]) -> np.ndarray:
        stored = dict(zip(present, tensors, strict=True))
        table = target_id_table(
            vocab_size=config.vocab_size,
            draft_vocab_size=config.draft_vocab_size,
            file=Path(config.source).parent,  # messages name the directory of the tensors
            d2t=stored.get("d2t"),
            t2d=stored.get("t2d"),
        )
        return identity if table is None else np.asarray(table)

    def disassemble(table: np.ndarray) -> Sequence[np.ndarray]:
        stored = vocabulary_tensors(table, vocab_size=config.vocab_size, draft_vocab_size=config.draft_vocab_size)
        return [stored[name] for name in present]

    identity = np.arange(config.num_draft_ids, dtype=np.int32)
    return {
        "draft_to_target": Recipe(
            tensors=present,
            axes=("draft_vocab",),
            assemble=assemble,
            disassemble=disassemble,
            is_floating=False,
            implied=None if config.is_pruned else identity,
        )
    }


def _draft_vocab_kernel(config: DraftConfig, name: str, width: int, *, axis: AxisName) -> Recipe:
    """The recipe of a Linear with one output per draft id.

    Outputs for padding ids beyond the target's vocabulary are dropped, because they must never be proposed.
    """
    shape = (config.draft_vocab_size, width)
    return transposed(name, shape, rows=config.num_draft_ids, axes=(axis, "draft_vocab"))
