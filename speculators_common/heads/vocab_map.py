"""The draft vocabulary, a subset of the target vocabulary: checkpoint tensors <-> the target id of every draft id.

A checkpoint stores `d2t` as offsets (target id = draft id + offset) and `t2d` as a mask over target ids. Here both
become one strictly increasing array of target ids, indexed by draft id. Target ids index Markov `W1` and the embedding,
and are the previous tokens; draft ids index the outputs of the head and of `W2`, and the draft logits.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from jaxtyping import Int32

from dspark_jax.speculators_common.errors import field_error, missing_field


def target_id_table(
    *,
    vocab_size: int,
    draft_vocab_size: int,
    file: Path | str,
    d2t: np.ndarray | None = None,
    t2d: np.ndarray | None = None,
) -> Int32[np.ndarray, " Vd"] | None:
    """Target id of every draft id, int32 [Vd] on the host; `None` for the identity.

    `d2t` is integer [Vd], `t2d` bool [V], as stored; each may be absent. With Vd > V the map is the identity too: the
    draft ids from V on have no target id and must not be proposed. Raises `CheckpointError` for wrong shapes and
    dtypes; for Vd < V without a map; for target ids outside [0, V) or not increasing; for a `t2d` that marks other ids
    than those of `d2t`; and for Vd >= V with a map other than the identity. The message names the first wrong id.
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


def vocabulary_tensors(
    table: Int32[np.ndarray, " ids"], *, vocab_size: int, draft_vocab_size: int
) -> dict[str, np.ndarray]:
    """The inverse of `target_id_table`: `d2t`, int64 [Vd], and `t2d`, bool [V].

    `table` has the target ids of the draft ids `0..len(table)-1`. Later draft ids are padding and get offset 0.
    """
    offsets = np.zeros((draft_vocab_size,), np.int64)
    offsets[: len(table)] = table - np.arange(len(table))
    mask = np.zeros((vocab_size,), np.bool_)
    mask[table] = True
    return {"d2t": offsets, "t2d": mask}


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
