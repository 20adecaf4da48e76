"""The draft formats that `dspark convert` writes. Both describe drafts with Qwen3 layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Protocol, runtime_checkable

from dspark_jax.speculators_common.formats.deepspec import names as deepspec
from dspark_jax.speculators_common.formats.deepspec.writer import to_deepspec
from dspark_jax.speculators_common.formats.draft_config import DraftConfig
from dspark_jax.speculators_common.formats.speculators import names as speculators
from dspark_jax.speculators_common.formats.speculators.writer import to_speculators


@runtime_checkable
class ConfigWriter(Protocol):
    """Turns a `DraftConfig` into the fields of a `config.json`. `dtype` is the name of the stored tensors' type."""

    def __call__(self, config: DraftConfig, *, dtype: str | None = None) -> dict[str, Any]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftFormat:
    """A draft format that can be written."""

    title: str  # name of the format in messages
    families: Collection[str]  # draft families whose checkpoints are in this format
    write: ConfigWriter
    always_stores_tables: bool  # whether every checkpoint holds its own embedding and head
    target_name_field: str | None  # dotted path of the field that names the target; None: the format has no such field


FORMATS: Mapping[str, DraftFormat] = {
    "speculators": DraftFormat(
        title="speculators",
        families=tuple(speculators.FAMILIES.values()),
        write=to_speculators,
        always_stores_tables=False,
        target_name_field="speculators_config.verifier.name_or_path",
    ),
    "deepspec": DraftFormat(
        title="DeepSpec",
        families=(deepspec.QWEN3_FAMILY, deepspec.GEMMA4_FAMILY),
        write=to_deepspec,
        always_stores_tables=True,
        target_name_field=None,
    ),
}
