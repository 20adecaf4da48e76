"""How many drafts a round has when nobody says: a number that is fast for the platform, not the whole block."""

from __future__ import annotations

import numpy as np

from dspark_jax.speculators_common.formats.draft_config import DraftConfig

# Cost of a round over that of a plain step, by k, drafting included: docs/performance.md has the command and the pair.
_MEASURED_COSTS = {"cpu": {2: 1.21, 3: 1.27, 6: 1.36}}
_ACCEPTANCE = 0.5  # of a draft whose predecessors were accepted: the same pair over five sets of prompts


def default_drafts(draft: DraftConfig, platform: str) -> tuple[int, str]:
    """k, and why.

    A number that the checkpoint states decides, if it is smaller than the block: the whole block is what writers state
    who did not choose. Otherwise the k with the highest expected gain, tau over the cost of a round, as far as costs
    were measured on the platform; where they were not, the whole block.
    """
    whole = draft.num_drafts
    stated = draft.stated_drafts
    if stated is not None and stated < whole:
        return stated, "stated by the checkpoint"
    if platform not in _MEASURED_COSTS:
        return whole, f"the whole block: costs of rounds were not measured on {platform}"
    best = max(range(1, whole + 1), key=lambda k: _expected_gain(k, _MEASURED_COSTS[platform]))
    return best, f"by costs and acceptance measured on {platform}; dspark bench finds the best of a pair"


def _expected_gain(k: int, costs: dict[int, float]) -> float:
    """Tau over cost; costs lie on lines through what was measured, and go on as the outer lines do."""
    known = sorted(costs)
    slope = (costs[known[-1]] - costs[known[-2]]) / (known[-1] - known[-2])
    inside = float(np.interp(k, known, [costs[one] for one in known]))
    cost = inside + slope * max(k - known[-1], 0) - slope * max(known[0] - k, 0)
    return (1 - _ACCEPTANCE ** (k + 1)) / (1 - _ACCEPTANCE) / cost
