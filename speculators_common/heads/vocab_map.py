"""The draft vocabulary as a subset of the target's: checkpoint tensors -> one absolute id table, and its use inside a
compiled step.

A checkpoint stores `d2t` as offsets (target id = draft id + offset) and `t2d` as a mask over target ids. Here both
become `target_ids[draft id]`, strictly increasing. Markov `W1`, the embedding and the previous token speak target ids;
head, `W2` and draft logits speak draft ids.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32

from dspark_jax.speculators_common.errors import CheckpointError, field_error, missing_field


@dataclasses.dataclass(frozen=True, eq=False)
class VocabMap:
    """Draft ids to target ids. A pytree whose only leaf is the table; the identity has no leaf.

    `target_ids` is int32 [Vd], or `None` where a draft id is the target id (Vd = V, or a head padded to Vd > V, whose
    surplus ids have no target and must not be proposed).
    """

    vocab_size: int  # V
    draft_vocab_size: int  # Vd
    target_ids: Any = None  # not typed as an array: jax rebuilds pytrees with other leaves too, such as shapes

    @classmethod
    def from_tensors(
        cls,
        *,
        vocab_size: int,
        draft_vocab_size: int,
        file: Path | str,
        d2t: np.ndarray | None = None,
        t2d: np.ndarray | None = None,
    ) -> VocabMap:
        """The map of a checkpoint, `d2t` integer [Vd] and `t2d` bool [V] as stored, each may be absent; see
        `target_id_table` for the refusals.
        """
        table = target_id_table(vocab_size=vocab_size, draft_vocab_size=draft_vocab_size, file=file, d2t=d2t, t2d=t2d)
        return cls(vocab_size=vocab_size, draft_vocab_size=draft_vocab_size, target_ids=table)

    @property
    def is_identity(self) -> bool:
        """Whether `to_target` returns its argument."""
        return self.target_ids is None

    def to_target(self, draft_ids: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
        """Target ids int32 of the draft ids, any shape; each must be in [0, Vd). Traceable: a gather from the table, or
        nothing at all.
        """
        if self.target_ids is None:
            return draft_ids
        return jnp.take(jnp.asarray(self.target_ids), draft_ids, axis=0, mode="clip")


jax.tree_util.register_dataclass(VocabMap, data_fields=["target_ids"], meta_fields=["vocab_size", "draft_vocab_size"])


def target_id_table(
    *,
    vocab_size: int,
    draft_vocab_size: int,
    file: Path | str,
    d2t: np.ndarray | None = None,
    t2d: np.ndarray | None = None,
) -> Int32[np.ndarray, " Vd"] | None:
    """Target id of every draft id, int32 [Vd] on the host; `None` for the identity.

    Raises `CheckpointError` for wrong shapes and dtypes, a missing map of a reduced vocabulary, target ids outside [0,
    V) or not increasing, `t2d` that marks other ids than `d2t` reaches, and a map other than the identity where Vd >=
    V; the message names the first id at fault.
    """
    if vocab_size < 1 or draft_vocab_size < 1:
        raise field_error(file, "draft_vocab_size", draft_vocab_size, f"an integer >= 1 (vocab_size is {vocab_size})")
    _check_layout(file, "d2t", d2t, (draft_vocab_size,), "i", "a signed integer dtype")
    _check_layout(file, "t2d", t2d, (vocab_size,), "b", "bool")
    if draft_vocab_size >= vocab_size:
        _check_identity(file, d2t, t2d, vocab_size, draft_vocab_size)
        return None
    if d2t is not None:
        table = _table_from_offsets(file, d2t, vocab_size)
        if t2d is not None:
            _check_mask(file, table, t2d)
        return table
    if t2d is not None:
        return _table_from_mask(file, t2d, draft_vocab_size)
    allowed = (
        f"an integer tensor of shape [{draft_vocab_size}], as draft_vocab_size {draft_vocab_size} is smaller "
        f"than vocab_size {vocab_size}"
    )
    raise missing_field(file, "tensor d2t", allowed)


def check_reload(installed: VocabMap, reloaded: VocabMap, file: Path | str) -> None:
    """Raise a `CheckpointError` that names `file` unless its map is the one in use: with other ids all shapes still
    fit, but drafts go wrong.
    """
    sizes = [(m.vocab_size, m.draft_vocab_size) for m in (installed, reloaded)]
    if sizes[0] != sizes[1]:
        raise CheckpointError(f"{file}: vocabulary map: found sizes (V, Vd) {sizes[1]}, allowed {sizes[0]} as in use")
    tables = [
        np.arange(m.draft_vocab_size) if m.target_ids is None else np.asarray(m.target_ids)
        for m in (installed, reloaded)
    ]
    different = np.flatnonzero(tables[0] != tables[1])
    if different.size:
        i = int(different[0])
        raise CheckpointError(
            f"{file}: vocabulary map: found draft id {i} as target id {tables[1][i]}, allowed {tables[0][i]} as in "
            "use; no second map can replace it"
        )


def _check_layout(
    file: Path | str, name: str, tensor: np.ndarray | None, shape: tuple[int], kind: str, dtype_text: str
) -> None:
    if tensor is None:
        return
    if tensor.shape != shape:
        raise field_error(file, f"tensor {name}", list(tensor.shape), f"shape {list(shape)}")
    if tensor.dtype.kind != kind:
        raise field_error(file, f"tensor {name}", str(tensor.dtype), dtype_text)


def _check_identity(
    file: Path | str, d2t: np.ndarray | None, t2d: np.ndarray | None, vocab_size: int, draft_vocab_size: int
) -> None:
    why = f"as draft_vocab_size {draft_vocab_size} is not smaller than vocab_size {vocab_size}"
    if d2t is not None and d2t.any():
        i = int(np.flatnonzero(d2t)[0])
        raise field_error(file, "tensor d2t", f"offset {d2t[i]} at draft id {i}", f"only offset 0 (identity), {why}")
    if t2d is not None and not t2d.all():
        raise field_error(
            file, "tensor t2d", f"false at target id {int(np.flatnonzero(~t2d)[0])}", f"only true (identity), {why}"
        )


def _table_from_offsets(file: Path | str, d2t: np.ndarray, vocab_size: int) -> Int32[np.ndarray, " Vd"]:
    draft_ids = np.arange(d2t.shape[0], dtype=np.int64)
    offsets = d2t.astype(np.int64)
    # Compared before adding: an offset near the end of int64 would wrap around.
    outside = np.flatnonzero((offsets < -draft_ids) | (offsets >= vocab_size - draft_ids))
    if outside.size:
        i = int(outside[0])
        found = f"draft id {i} with offset {d2t[i]}, target id {i + int(d2t[i])}"
        raise field_error(file, "tensor d2t", found, f"target ids (draft id + offset) in [0, {vocab_size})")
    table = draft_ids + offsets
    falling = np.flatnonzero(np.diff(table) <= 0)
    if falling.size:
        i = int(falling[0]) + 1
        found = f"draft id {i} as target id {table[i]} after target id {table[i - 1]}"
        raise field_error(file, "tensor d2t", found, "target ids (draft id + offset) that increase strictly")
    return table.astype(np.int32)


def _check_mask(file: Path | str, table: np.ndarray, t2d: np.ndarray) -> None:
    reached = np.zeros_like(t2d)
    reached[table] = True
    different = np.flatnonzero(reached != t2d)
    if different.size:
        j = int(different[0])
        found = f"{str(bool(t2d[j])).lower()} at target id {j}, {int(t2d.sum())} true in all"
        raise field_error(
            file,
            "tensor t2d",
            found,
            f"true exactly at the {table.shape[0]} target ids of d2t, which {'has' if reached[j] else 'lacks'} {j}",
        )


def _table_from_mask(file: Path | str, t2d: np.ndarray, draft_vocab_size: int) -> Int32[np.ndarray, " Vd"]:
    table = np.flatnonzero(t2d)
    if table.shape[0] > draft_vocab_size:
        found = f"{table.shape[0]} true, the first surplus one at target id {table[draft_vocab_size]}"
        raise field_error(file, "tensor t2d", found, f"{draft_vocab_size} true (draft_vocab_size)")
    if table.shape[0] < draft_vocab_size:
        found = f"{table.shape[0]} true, none for draft id {table.shape[0]}"
        raise field_error(file, "tensor t2d", found, f"{draft_vocab_size} true (draft_vocab_size)")
    return table.astype(np.int32)
