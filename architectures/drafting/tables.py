"""The origin of a draft's tables. The tables are the embedding and the head; they are the draft's or the target's."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Literal

from dspark_jax.speculators_common.formats.draft_config import DraftConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftTables:
    """The origin of the embedding and of the head.

    `own`: it is stored in the draft's checkpoint. `target`: the draft uses the target's, without a copy. `target_rows`:
    a copy of those rows of the target's head that belong to the draft vocabulary, in the order of draft ids.
    """

    embed_tokens: Literal["own", "target"] = "own"
    lm_head: Literal["own", "target", "target_rows"] = "own"


def tables_of(config: DraftConfig, names: Collection[str]) -> DraftTables:
    """The origins for a checkpoint with the tensors `names`. A table that it does not store is the target's."""
    if not config.stores_tables:
        return DraftTables(embed_tokens="target", lm_head="target")
    lm_head: Literal["own", "target", "target_rows"] = "own"
    if "lm_head.weight" not in names:
        lm_head = "target_rows" if config.is_pruned else "target"
    return DraftTables(embed_tokens="own" if "embed_tokens.weight" in names else "target", lm_head=lm_head)


def borrowed_tensors(tables: DraftTables) -> frozenset[str]:
    """Names of the tensors that the module copies from the target, and that the draft's file does not store."""
    return frozenset({"lm_head.weight"} if tables.lm_head == "target_rows" else ())


def optional_tensors(config: DraftConfig, tables: DraftTables) -> frozenset[str]:
    """Names of the tensors that the format allows to omit and that a newly written file of this draft has."""
    names = {"confidence_head.proj.bias"}
    if tables.embed_tokens == "own":
        names.add("embed_tokens.weight")
    if tables.lm_head != "target":
        names.add("lm_head.weight")
    return frozenset(names | ({"d2t", "t2d"} if config.is_pruned else set()))
