"""Reading rotary settings from raw configs, of targets and drafts alike, in their new and old layouts.

New: `rope_parameters`, flat or one object per layer kind. Old: `rope_theta` beside `rope_scaling`, whose kind is named
`type` or `rope_type`. A file may use both at once; they must then agree.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from dspark_jax.speculators_common.errors import field_error, missing_field
from dspark_jax.speculators_common.formats.choice import Choice
from dspark_jax.speculators_common.formats.fields import Fields, agreed
from dspark_jax.speculators_common.formats.rope.config import RopeConfig, RopeKind
from dspark_jax.speculators_common.formats.size_limits import INT32_MAX

# `proportional` belongs to one family, which asks for it.
USUAL_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")
_LAYER_KINDS = ("full_attention", "sliding_attention")
# Without a type these would be left out of the rotation in silence.
_SCALING_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
# Pairing neighbouring elements instead of the two halves of a head is another network; each name with the only value we
# support.
_HALVES_PAIRED = {"rope_is_neox_style": True, "rope_interleave": False, "rope_interleaved": False}


def parse_rope(
    fields: Fields,
    *,
    head_dim: int,
    head_dim_name: str = "head_dim",
    partial_rotary_factor: float | None = None,
    layer_types: Sequence[str] = ("full_attention",),
    kinds: Collection[RopeKind] = USUAL_KINDS,
    default_theta: float | None = None,
) -> RopeConfig:
    """The rotary settings of `fields`.

    `head_dim_name` is the field that `head_dim` comes from. `partial_rotary_factor` is the share of `head_dim` that
    rotates; `None` takes what the file states, or the whole head. `layer_types` are tried in this order where the
    settings are nested per layer kind. `kinds` are the RoPE types that the family knows. `default_theta` is what a file
    of the family means that states none; `None`: it must. Raises `CheckpointError` for another kind, a missing theta, a
    missing or bad scaling parameter, or a rotary width that is not even.
    """
    section = _rope_section(fields, layer_types)
    if partial_rotary_factor is None:
        partial_rotary_factor = stated_partial_rotary_factor(fields, layer_types)
    everywhere = fields.joined(*section.places)
    for name, supported in _HALVES_PAIRED.items():
        if everywhere.boolean(name, default=supported) is not supported:
            raise everywhere.error(name, not supported, str(supported).lower())
    kind = _kind(section, kinds)
    theta = _theta(fields, section, kind, default_theta)
    share = 1.0 if partial_rotary_factor is None else partial_rotary_factor
    if kind == "proportional":
        head_dim = _rotary_dim(fields, head_dim_name, head_dim, 1.0, kind)
        pairs = int(share * head_dim // 2)
        factor = section.number("factor", minimum=1, default=1.0)
        return RopeConfig(theta=theta, rotary_dim=head_dim, kind=kind, factor=factor, rotating_pairs=pairs)
    rope = RopeConfig(
        theta=theta,
        rotary_dim=_rotary_dim(fields, head_dim_name, head_dim, share, kind),
        kind=kind,
    )
    if kind == "default":
        section.ignore("original_max_position_embeddings")  # nothing is scaled
        return rope
    rope = dataclasses.replace(rope, factor=section.number("factor", minimum=1))
    if kind == "linear":
        original = section.integer("original_max_position_embeddings", minimum=1, default=0)
        return dataclasses.replace(rope, original_max_position_embeddings=original)
    return _yarn(fields, section, rope) if kind == "yarn" else _llama3(section, rope)


def stated_partial_rotary_factor(fields: Fields, layer_types: Sequence[str] = ("full_attention",)) -> float | None:
    """`partial_rotary_factor` in (0, 1] as the file states it, beside the rotary settings or inside them; `None` if it
    says nothing.
    """
    everywhere = fields.joined(*_rope_section(fields, layer_types).places)
    return everywhere.number("partial_rotary_factor", above=0, maximum=1, default=None)


def theta_choice(
    fields: Fields, layer_types: Sequence[str], theta: float, name: str = "rope_theta"
) -> tuple[Choice, ...]:
    """The choice of `theta`, called `name`, where the file states none."""
    if _rope_section(fields, layer_types).joined(*fields.places).has("rope_theta"):
        return ()
    return (Choice(name=name, value=str(theta), reason="the file does not say; default of the format", flag=""),)


def usable_length(stated: int, rope: RopeConfig, file: Path | str) -> int:
    """The positions that a model can use whose config states `max_position_embeddings` as `stated`.

    A rotation stretched from an original length serves `factor` times that length, even where the config still states
    the length before it was stretched. llama3 is left out: its factor shapes the frequencies and is no ratio of
    lengths. So is a linear rotation that states no original length: files differ in whether the stated one is before
    or after. Raises `CheckpointError` if the length is beyond int32.
    """
    if rope.kind not in ("yarn", "linear"):
        return stated
    length = max(stated, int(rope.factor * rope.original_max_position_embeddings))
    if length > INT32_MAX:
        raise field_error(
            file, "factor", rope.factor, f"at most {INT32_MAX} / {rope.original_max_position_embeddings}, within int32"
        )
    return length


def usual_attention_factor(factor: float) -> float:
    """The attention factor of a yarn rotation that states none."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(section: Fields, rope: RopeConfig) -> RopeConfig:
    low, high = section.number("low_freq_factor", above=0), section.number("high_freq_factor", above=0)
    if high <= low:
        raise section.error("high_freq_factor", high, f"a finite number > {low} (low_freq_factor)")
    return dataclasses.replace(
        rope,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=section.integer("original_max_position_embeddings", minimum=1),
    )


def _yarn(fields: Fields, section: Fields, rope: RopeConfig) -> RopeConfig:
    """A file that does not state the original context length means `max_position_embeddings`."""
    # `attn_factor` multiplies the usual factor, `attention_factor` replaces it.
    share = section.number("attn_factor", above=0, default=1.0)
    if section.has("attn_factor") and section.has("attention_factor"):
        raise section.error("attn_factor", share, "no such field beside attention_factor")
    for name in ("mscale", "mscale_all_dim"):
        if section.has(name):
            raise section.error(
                name, section.raw.get(name), "no such field: only the usual yarn attention factor is supported"
            )
    if not section.boolean("truncate", default=True):
        raise section.error("truncate", False, "true")
    slow, fast = section.number("beta_slow", above=0, default=1.0), section.number("beta_fast", above=0, default=32.0)
    if fast <= slow:
        raise section.error("beta_fast", fast, f"a finite number > {slow} (beta_slow)")
    original = section.integer("original_max_position_embeddings", minimum=1, default=0)
    usual = usual_attention_factor(rope.factor)
    return dataclasses.replace(
        rope,
        beta_slow=slow,
        beta_fast=fast,
        attention_factor=section.number("attention_factor", above=0, default=share * usual),
        original_max_position_embeddings=original or fields.integer("max_position_embeddings", minimum=1),
    )


def _rope_section(fields: Fields, layer_types: Sequence[str]) -> Fields:
    sections = [section for name in ("rope_parameters", "rope_scaling") for section in fields.section(name).places]
    entries = [_entry(section, layer_types) for section in sections]
    return entries[0].joined(*entries[1:])


def _entry(section: Fields, layer_types: Sequence[str]) -> Fields:
    nested = [name for name, value in section.raw.items() if isinstance(value, Mapping)]
    if not nested:
        return section
    chosen = next((name for name in layer_types if name in nested), None)
    if chosen is None:
        raise field_error(section.file, section.prefix, nested, f"an entry for {' or '.join(layer_types)}")
    # Values beside the per-kind objects are leftovers of the writer, if they are those of one of the kinds or say
    # `default`.
    repeated = (
        name
        for name, value in section.raw.items()
        if value == "default" or (name not in nested and any(section.raw[kind].get(name) == value for kind in nested))
    )
    section.ignore(*repeated, *(name for name in _LAYER_KINDS if name != chosen))
    return section.section(chosen)


def _kind(section: Fields, kinds: Collection[RopeKind]) -> RopeKind:
    stated = [(section.label(name), section.string(name)) for name in ("rope_type", "type") if section.has(name)]
    scaled = next((name for name in _SCALING_FIELDS if section.has(name)), None)
    if not stated and scaled is not None:
        raise section.missing("rope_type", f"{', '.join(kinds)}, as {scaled} is stated")
    name = agreed(section.file, stated) if stated else "default"
    for kind in kinds:
        if name == kind:
            return kind
    where = stated[0][0] if stated else section.label("rope_type")
    raise field_error(section.file, where, name, f"{', '.join(kinds)} as RoPE type")


def _theta(fields: Fields, section: Fields, kind: RopeKind, default: float | None) -> float:
    everywhere = section.joined(*fields.places)
    if not everywhere.has("rope_theta"):
        if default is not None:
            return default
        raise missing_field(
            fields.file, f"{section.prefix}.rope_theta or rope_theta", f"a finite number > 1 (RoPE type {kind!r})"
        )
    return everywhere.number("rope_theta", above=1)


def _rotary_dim(fields: Fields, name: str, head_dim: int, factor: float, kind: RopeKind) -> int:
    rotary_dim = int(head_dim * factor)
    if rotary_dim < 2 or rotary_dim % 2:
        origin = (
            "" if fields.has(name) else "; the file does not say, so its hidden_size and num_attention_heads may decide"
        )
        at = f"partial_rotary_factor {factor}, rope_type {kind}"
        raise fields.error(
            name, head_dim, f"a head whose rotary part is an even number >= 2, found {rotary_dim} at {at}{origin}"
        )
    return rotary_dim
