"""The parts of random valid configs that drafts and targets share: rotations, head sizes, layer kinds, harmless fields.

A `Sample` is one config in several spellings that mean the same, and the optional tensors of its file. Values follow
the formats, not the parsers: everything that a format allows is generated, whether or not the code accepts it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

Raw = dict[str, Any]
Draw = Callable[..., Any]
FULL, SLIDING = "full_attention", "sliding_attention"
USUAL_ROPES = ("default", "linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """`spellings` describe one model; `names` are the optional tensors beside those that the config asks for."""

    spellings: tuple[Raw, ...]
    names: tuple[str, ...] = ()

    @property
    def raw(self) -> Raw:
        """The first spelling."""
        return self.spellings[0]


def ropes(draw: Draw, kinds: Sequence[str], *, share: float | None = None) -> Raw:
    """Settings of one rotation in the new layout."""
    kind = draw(st.sampled_from(kinds))
    settings: Raw = {"rope_theta": draw(st.sampled_from([1e4, 500000, 1e6, 2.5])), "rope_type": kind}
    if kind == "proportional":
        settings["partial_rotary_factor"] = draw(st.sampled_from([0.25, 0.5, 1.0]))
    elif share is not None:
        settings["partial_rotary_factor"] = share
    if kind in ("linear", "llama3", "yarn"):
        settings["factor"] = draw(st.sampled_from([1.0, 4, 8.0]))
    if kind == "llama3":
        settings |= {
            "low_freq_factor": 1.0,
            "high_freq_factor": draw(st.sampled_from([2, 4.0])),
            "original_max_position_embeddings": 64,
        }
    if kind == "yarn":
        optional = {
            "original_max_position_embeddings": 128,
            "beta_fast": 16,
            "beta_slow": 2.0,
            "attention_factor": 1.5,
            "truncate": True,
        }
        settings |= {name: value for name, value in optional.items() if draw(st.booleans())}
    return settings


def rope_spellings(draw: Draw, settings: Raw) -> tuple[Raw, ...]:
    """The same rotation in the new layout and in the old ones."""
    theta = settings["rope_theta"]
    scaling = {name: value for name, value in settings.items() if name != "rope_theta"}
    by_type = {("type" if name == "rope_type" else name): value for name, value in scaling.items()}
    spellings = [
        {"rope_parameters": settings},
        {"rope_theta": theta, "rope_scaling": scaling},
        {"rope_theta": theta, "rope_parameters": by_type},
        {"rope_theta": theta, "rope_parameters": settings, "rope_scaling": by_type},
    ]
    if settings["rope_type"] == "default" and "partial_rotary_factor" not in settings:
        spellings += [{"rope_theta": theta}, {"rope_theta": theta, "rope_scaling": None}]
    return tuple(draw(st.permutations(spellings))[:3])


def heads_of(draw: Draw, *, head_dims: Sequence[int] = (2, 4, 8, 10)) -> Raw:
    """Heads, grouped or not, of a size of their own."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return {
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.sampled_from(head_dims)),
    }


def some(draw: Draw, optional: Raw) -> Raw:
    """Some of the fields that a file may leave out."""
    return {name: value for name, value in optional.items() if draw(st.booleans())}


def layer_kinds(draw: Draw, count: int, kinds: Sequence[str] = (FULL, SLIDING)) -> list[str]:
    """The kind of each layer."""
    return draw(st.lists(st.sampled_from(kinds), min_size=count, max_size=count))


def harmless(draw: Draw) -> Raw:
    """Fields that libraries write and nobody needs."""
    return some(
        draw,
        {
            "transformers_version": "5.10.2",
            "use_cache": True,
            "bos_token_id": 1,
            "eos_token_id": [2, 3],
            "pad_token_id": None,
            "initializer_range": 0.02,
            "attention_dropout": 0.0,
            "dtype": draw(st.sampled_from(["bfloat16", "float32"])),
        },
    )
