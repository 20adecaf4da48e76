"""Writing a `RopeConfig` as the `rope_parameters` of a config. The inverse of `parse_rope` in `rope/fields.py`."""

from __future__ import annotations

import math
from typing import Any

from dspark_jax.speculators_common.formats.rope.config import RopeConfig
from dspark_jax.speculators_common.formats.rope.fields import default_attention_factor


def rope_parameters(rope: RopeConfig, head_dim: int) -> dict[str, Any]:
    """The fields of `rope_parameters`. Values that a reader assumes by default are left out where possible.

    `head_dim` is the number of elements of a head. `parse_rope` gives an equal `RopeConfig` back.
    """
    fields: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind == "proportional":
        fields["partial_rotary_factor"] = _factor_of_pairs(rope.rotating_pairs, head_dim)
        return fields if rope.factor == 1.0 else {**fields, "factor": rope.factor}
    if rope.rotary_dim != head_dim:
        fields["partial_rotary_factor"] = _factor_of_width(rope.rotary_dim, head_dim)
    if rope.kind == "default":
        return fields
    fields["factor"] = rope.factor
    if rope.kind == "llama3":
        fields |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        fields |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        if rope.attention_factor != default_attention_factor(rope.factor):
            fields["attention_factor"] = rope.attention_factor
    if rope.original_max_position_embeddings:
        fields["original_max_position_embeddings"] = rope.original_max_position_embeddings
    return fields


def _factor_of_width(rotary_dim: int, head_dim: int) -> float:
    """The `partial_rotary_factor` from which readers compute `rotary_dim`; they round down."""
    factor = rotary_dim / head_dim
    return factor if int(head_dim * factor) == rotary_dim else math.nextafter(factor, 1.0)


def _factor_of_pairs(pairs: int, head_dim: int) -> float:
    """The `partial_rotary_factor` from which readers compute the number of rotating `pairs`; they round down.

    Readers do not allow 0. For no pairs the factor is that of one element, which is less than a pair.
    """
    factor = 2 * pairs / head_dim if pairs else 1 / head_dim
    return factor if int(factor * head_dim // 2) == pairs else math.nextafter(factor, 1.0)
