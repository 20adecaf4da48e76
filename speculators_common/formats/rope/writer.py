"""`RopeConfig` -> the `rope_parameters` of a config file, in the new layout; the inverse of
`rope_fields.parse_rope`.
"""

from __future__ import annotations

import math
from typing import Any

from dspark_jax.speculators_common.formats.rope.config import RopeConfig
from dspark_jax.speculators_common.formats.rope.fields import usual_attention_factor


def rope_parameters(rope: RopeConfig, head_dim: int) -> dict[str, Any]:
    """The fields of one rotation. The share of the head that turns is stated only where it is not the whole."""
    fields: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind == "proportional":
        fields["partial_rotary_factor"] = _pair_share(rope.rotating_pairs, head_dim)
        return fields if rope.factor == 1.0 else {**fields, "factor": rope.factor}
    if rope.rotary_dim != head_dim:
        fields["partial_rotary_factor"] = _width_share(rope.rotary_dim, head_dim)
    if rope.kind == "default":
        return fields
    fields["factor"] = rope.factor
    if rope.kind == "llama3":
        fields |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        fields |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        if rope.attention_factor != usual_attention_factor(rope.factor):
            fields["attention_factor"] = rope.attention_factor
    if rope.original_max_position_embeddings:
        fields["original_max_position_embeddings"] = rope.original_max_position_embeddings
    return fields


def _width_share(rotary_dim: int, head_dim: int) -> float:
    """A share of `head_dim` that readers round down to `rotary_dim`."""
    share = rotary_dim / head_dim
    return share if int(head_dim * share) == rotary_dim else math.nextafter(share, 1.0)


def _pair_share(pairs: int, head_dim: int) -> float:
    """A share of `head_dim` whose half readers round down to `pairs`. Never zero, which no reader allows: less than two
    elements are no pair.
    """
    share = 2 * pairs / head_dim if pairs else 1 / head_dim
    return share if int(share * head_dim // 2) == pairs else math.nextafter(share, 1.0)
