"""The default of k, the drafts per round: a number that is fast on the platform, not the whole block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dspark_jax.speculators_common.formats.draft_config import DraftConfig


class _Measured(NamedTuple):
    tau: float
    cost: float  # time of a round / time of a plain step


# By platform, then by k. Measured with the demo pair on five prompt sets, see docs/performance.md.
_MEASURED: Mapping[str, Mapping[int, _Measured]] = {
    "cpu": {2: _Measured(1.73, 1.21), 3: _Measured(1.85, 1.27), 6: _Measured(1.94, 1.36)}
}


def default_drafts(draft: DraftConfig, platform: str) -> tuple[int, str]:
    """The default k for a draft on a platform, and the reason for it.

    If the checkpoint states a k below the size of the block, that is the default. (A stated k equal to the block is
    ignored: writers put it there without having measured.) Otherwise it is the k with the highest measured gain on the
    platform, tau / cost of a round, among those that the block can give. Without measurements it is the whole block.
    """
    whole, stated = draft.max_drafts, draft.stated_drafts
    if stated is not None and stated < whole:
        return stated, "stated by the checkpoint"
    measured = _MEASURED.get(platform, {})
    gains = {k: figures.tau / figures.cost for k, figures in measured.items() if k <= whole}
    if not gains:
        return whole, f"the whole block: no fewer were measured on {platform}"
    best = max(gains, key=lambda k: gains[k])
    return best, f"by cost and acceptance measured on {platform}; dspark bench finds the best number of a pair"
