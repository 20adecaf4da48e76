"""Checks that two loaded drafts are equal bit for bit: config, parameters, and the drafts from the same inputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from dspark_jax.architectures.nn.attention.kv_cache import KVCache, KVPages
from dspark_jax.architectures.nn.attention.ragged_batch import RaggedBatch
from dspark_jax.architectures.nn.embedding import EmbeddingAndHead
from dspark_jax.pipelines.checkpoints.loading import LoadedDraft
from dspark_jax.speculators_common.errors import CheckpointError
from dspark_jax.speculators_common.formats.draft_config import DraftConfig

_ROWS, _CONTEXT, _PAGE_SIZE = 2, 12, 16


def check_equal_drafts(first: LoadedDraft, second: LoadedDraft) -> int:
    """Raise `CheckpointError` for the first difference of two drafts; returns their number of parameters.

    Compared are the config fields that count for equality, every parameter, and the results of one block of two rows
    over the same random context: slot states, base logits, drafts and confidences. If the drafts borrow tables, both
    get the same random ones.
    """
    _check_configs(first, second)
    ours, theirs = (_parameters(draft.module) for draft in (first, second))
    where, wanted = second.checkpoint.path, f"allowed those of {first.checkpoint.path}"
    if ours.keys() != theirs.keys():
        only = ", ".join(sorted(ours.keys() ^ theirs.keys()))
        raise CheckpointError(
            f"found {only} in one of two drafts, {wanted}", file=where, field="parameters", found=only
        )
    for name, parameter in ours.items():
        if not _same_bits(np.asarray(parameter.get_value()), np.asarray(theirs[name].get_value())):
            raise CheckpointError(f"found other bits, {wanted}", file=where, field=f"parameter {name}")
    given, other = _block(first.module), _block(second.module)
    for name, value in given.items():
        if not _same_bits(value, other[name]):
            raise CheckpointError(f"found other bits, {wanted}", file=where, field=f"{name} of a block")
    return len(ours)


def _parameters(module: nnx.Module) -> dict[str, nnx.Variable]:
    return {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(nnx.state(module))}


class _Tables(EmbeddingAndHead):
    """The two tables of a target, without the target."""

    def compute_logits(self, hidden: Float[Array, "*axes H"]) -> Float[Array, "*axes V"]:
        """Raw logits: no draft that is compared here asks for a target's soft-cap."""
        return self.lm_head(hidden)


def _check_configs(first: LoadedDraft, second: LoadedDraft) -> None:
    for field in dataclasses.fields(DraftConfig):
        one, other = (getattr(draft.config, field.name) for draft in (first, second))
        if field.compare and one != other:
            allowed = f"{one!r} as in {first.config.source}"
            raise CheckpointError(file=second.config.source, field=field.name, found=other, allowed=allowed)


def _block(module: Any) -> dict[str, np.ndarray]:
    """The results of one greedy block. Its random taps, anchors and borrowed tables depend on the config only."""
    config: DraftConfig = module.config
    rng = np.random.default_rng(0)
    taps = jnp.asarray(
        rng.normal(size=(_ROWS * _CONTEXT, config.num_taps * config.target_hidden_size)).astype(np.float32)
    ).astype(module.dtype)
    anchors = jnp.asarray(rng.integers(0, config.vocab_size, _ROWS), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(_CONTEXT, dtype=jnp.int32), (_ROWS, _CONTEXT))
    target = None
    if not (module.has_own_embed_tokens and module.has_own_lm_head):
        target = _Tables(
            config.vocab_size,
            config.table_width,
            tied=False,
            dtype=module.dtype,
            platform=module.platform,
            rngs=nnx.Rngs(0),
        )

    # Not jitted: compiling takes longer than running it once.
    cache = KVCache(
        pages=KVPages.zeros(module.kv_params(_PAGE_SIZE), _ROWS),
        page_table=jnp.arange(_ROWS, dtype=jnp.int32)[:, None],
        lengths=jnp.zeros((_ROWS,), jnp.int32),
    )
    batch = RaggedBatch.rectangle(jnp.zeros_like(positions), positions)
    cache = module.materialize_kv(module.project_target_hidden(taps), batch, cache)
    cache = dataclasses.replace(cache, lengths=jnp.full((_ROWS,), _CONTEXT, jnp.int32))
    hidden = module.forward_block(module.embed_block(anchors, target), cache)
    base_logits = module.compute_logits(hidden, target)
    drafts, corrected, _ = module.draft_chain(base_logits, anchors, hidden=hidden)
    found = {"slot states": hidden, "base logits": base_logits, "corrected logits": corrected, "drafts": drafts}
    confidences = module.predict_confidence(hidden, anchors, drafts)
    found |= {} if confidences is None else {"confidences": confidences}
    return {name: np.asarray(value) for name, value in found.items()}


def _same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    ours, theirs = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (one, other))
    return np.array_equal(ours, theirs)
