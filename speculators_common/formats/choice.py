"""A decision that reading a checkpoint took."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A decision that the checkpoint leaves open: what was chosen, why, and the command-line flag that overrides it."""

    name: str
    value: str
    reason: str
    flag: str
