"""The weight recipes of the compact draft. Every tensor of the file is one parameter of the module."""

from __future__ import annotations

from collections.abc import Collection

from dspark_jax.speculators_common.formats.compact.format import tensor_shapes
from dspark_jax.speculators_common.formats.draft_config import DraftConfig
from dspark_jax.speculators_common.formats.recipes import Axes, Recipe, copied

_LAYER_PATHS = {
    "attn_norm": "attention_norm.weight",
    "q": "query.kernel",
    "k": "key.kernel",
    "v": "value.kernel",
    "o": "output.kernel",
    "ff_norm": "feed_forward_norm.weight",
    "gate": "gate.kernel",
    "up": "up.kernel",
    "down": "down.kernel",
}
_PATHS = {
    "W_c": "context_projection.kernel",
    "ctx_norm": "context_norm.weight",
    "tok_proj": "token_projection.kernel",
    "mask_emb": "mask_rows",
    "block_pos": "slot_rows",
    "out_norm": "norm.weight",
    "out_proj": "output_projection.kernel",
    "markov.w1": "markov_head.w1",
    "markov.w2": "markov_head.w2.kernel",
    "conf.w": "confidence_head.projection.kernel",
    "conf.b": "confidence_head.projection.bias",
    "rnn.wH": "markov_head.transition.kernel",
    "rnn.bH": "markov_head.transition.bias",
    "rnn.wO": "markov_head.output.kernel",
}
_AXES: dict[str, Axes] = {
    "attn_norm": ("hidden",),
    "q": ("hidden", "heads"),
    "k": ("hidden", "heads"),
    "v": ("hidden", "heads"),
    "o": ("heads", "hidden"),
    "ff_norm": ("hidden",),
    "gate": ("hidden", "mlp"),
    "up": ("hidden", "mlp"),
    "down": ("mlp", "hidden"),
    "W_c": ("taps", "hidden"),
    "ctx_norm": ("hidden",),
    "tok_proj": (None, "hidden"),
    "mask_emb": (None, "hidden"),
    "block_pos": (None, "hidden"),
    "out_norm": ("hidden",),
    "out_proj": ("hidden", None),
    "markov.w1": ("vocab", "rank"),
    "markov.w2": ("rank", "vocab"),
    "conf.w": (None, None),
    "conf.b": (None,),
    "rnn.wH": (None, "rank"),
    "rnn.bH": ("rank",),
    "rnn.wO": ("rank", "vocab"),
}


def parameter_path(tensor: str) -> str:
    """The dotted path of the parameter that the file stores as `tensor`."""
    if not tensor.startswith("bb."):
        return _PATHS[tensor]
    _, layer, name = tensor.split(".")
    return f"layers.{layer}.{_LAYER_PATHS[name]}"


def compact_recipes(config: DraftConfig, names: Collection[str] = ()) -> dict[str, Recipe]:
    """The recipes of all parameters of `CompactDraft`. `names` has no influence: the format fixes the tensors."""
    recipes = {}
    for name, stored in tensor_shapes(config).items():
        axes = _AXES[name.rsplit(".", 1)[-1] if name.startswith("bb.") else name]
        recipes[parameter_path(name)] = copied(name, stored, axes=axes)
    return recipes
