"""Tensors of a compact draft's file <-> parameters of the module: one for one, in both directions."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from flax import nnx
from jaxtyping import Float

from dspark_jax.architectures.dspark_compact.model import CompactDraft
from dspark_jax.speculators_common.formats.compact.format import tensor_shapes
from dspark_jax.speculators_common.formats.draft_config import DraftConfig
from dspark_jax.speculators_common.formats.weight_adapters import Recipe
from dspark_jax.speculators_common.numerics.matmul import kernel_values
from dspark_jax.speculators_common.numerics.rows import decode_rows

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


def parameter_path(tensor: str) -> str:
    """Dotted path in the module of the parameter that `tensor` is."""
    if not tensor.startswith("bb."):
        return _PATHS[tensor]
    _, layer, name = tensor.split(".")
    return f"layers.{layer}.{_LAYER_PATHS[name]}"


def compact_recipes(config: DraftConfig, names: Collection[str] = ()) -> dict[str, Recipe]:
    """One recipe per parameter of `CompactDraft`; `names` decides nothing, the set of tensors is fixed."""
    shapes = tensor_shapes(config)
    return {parameter_path(name): Recipe(tensors={name: shape}) for name, shape in shapes.items()}


def tensors_of(draft: CompactDraft) -> dict[str, Float[np.ndarray, "..."]]:
    """The tensors of a draft as its file has them: float32, `[in, out]`, in the order of `param_names`."""
    flat = {".".join(str(key) for key in path): variable for path, variable in nnx.to_flat_state(nnx.state(draft))}
    tensors = {}
    for name, shape in tensor_shapes(draft.config).items():
        values = decode_rows(kernel_values(flat[parameter_path(name)]))
        tensors[name] = np.asarray(values).astype(np.float32).reshape(shape)
    return tensors
