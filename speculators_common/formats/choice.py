"""A value that a reader chose because the checkpoint does not decide it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from dspark_jax.speculators_common.formats.fields import Fields

DEFAULT_REASON = "the file does not say; default of the format"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """One value that the checkpoint does not decide, or that the user replaced.

    `dspark info` prints every choice. `flag` is the command-line flag that overrides it; empty if there is none.
    """

    name: str
    value: str
    reason: str
    flag: str = ""


def default_choices(fields: Fields, defaults: Mapping[str, object]) -> tuple[Choice, ...]:
    """One choice for each of `defaults` (field name -> default of the format) that the file does not state."""
    return tuple(
        Choice(name=name, value=value if isinstance(value, str) else json.dumps(value), reason=DEFAULT_REASON)
        for name, value in defaults.items()
        if not fields.has(name)
    )
