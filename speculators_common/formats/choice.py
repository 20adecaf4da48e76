"""A value that a reader chose because the checkpoint does not decide it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """One value that the checkpoint does not decide, or that the user replaced.

    `dspark info` prints every choice. `flag` is the command-line flag that overrides it; empty if there is none.
    """

    name: str
    value: str
    reason: str
    flag: str
