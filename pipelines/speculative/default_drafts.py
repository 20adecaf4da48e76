"""How many drafts a round has when nobody says: a number that is fast on the platform, not the whole block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dspark_jax.speculators_common.formats.draft_config import DraftConfig


class _Measured(NamedTuple):
    tau: float
    cost: float  # of a round, over that of a plain step


# By platform and k: the demo pair over five sets of prompts, see docs/performance.md.
_MEASURED: Mapping[str, Mapping[int, _Measured]] = {
    "cpu": {2: _Measured(1.73, 1.21), 3: _Measured(1.85, 1.27), 6: _Measured(1.94, 1.36)}
}


def default_drafts(draft: DraftConfig, platform: str) -> tuple[int, str]:
    """k, and why.

    A number that the checkpoint states decides, if it is smaller than the block: the whole block is what writers state
    who did not choose. Otherwise it is the number with the highest gain that was measured on the platform, tau over the
    cost of a round, if the block gives so many; where nothing was measured, the whole block.
    """
    whole, stated = draft.max_drafts, draft.stated_drafts
    if stated is not None and stated < whole:
        return stated, "stated by the checkpoint"
    measured = _MEASURED.get(platform, {})
    gains = {k: one.tau / one.cost for k, one in measured.items() if k <= whole}
    if not gains:
        return whole, f"the whole block: no fewer were measured on {platform}"
    best = max(gains, key=lambda k: gains[k])
    return best, f"by cost and acceptance measured on {platform}; dspark bench finds the best number of a pair"
