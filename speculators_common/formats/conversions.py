"""The formats that drafts of Qwen3 layers are converted to: the two that have words for each other's drafts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from dspark_jax.speculators_common.formats.deepspec import names as deepspec
from dspark_jax.speculators_common.formats.deepspec.writer import to_deepspec
from dspark_jax.speculators_common.formats.speculators import names as speculators
from dspark_jax.speculators_common.formats.speculators.writer import to_speculators


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftFormat:
    """A format that can be written. `families` are the drafts that are in it already; `target_name_field` is where it
    names the target, `None` if it has no room for that.
    """

    title: str
    families: Collection[str]
    write: Callable[..., dict[str, Any]]
    always_stores_tables: bool
    target_name_field: str | None


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
