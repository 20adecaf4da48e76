"""Reading the rotary settings of targets and drafts from a config, in the layouts of transformers.

The new layout has `rope_parameters`: the settings, or one object of settings per layer type. The old layout has
`rope_theta` at the top level and the other settings in `rope_scaling`, whose kind is in `rope_type` or `type`. A file
may use both layouts. Then they must agree.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from dspark_jax.speculators_common.errors import field_error, missing_field
from dspark_jax.speculators_common.formats.choice import DEFAULT_REASON, Choice
from dspark_jax.speculators_common.formats.fields import Fields, agreed
from dspark_jax.speculators_common.formats.rope.config import RopeConfig, RopeKind
from dspark_jax.speculators_common.formats.size_limits import INT32_MAX

# The kinds of every family. Only Gemma 4 also has `proportional`.
COMMON_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")
_LAYER_TYPES = ("full_attention", "sliding_attention")
# Fields that only a scaled rotation has. With one of them, the kind must be stated.
_SCALING_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
# Fields that state which elements of a head form a pair -> the supported value: element i of the first half and element
# i of the second half. The other value pairs neighbouring elements.
_PAIRING_FIELDS = {"rope_is_neox_style": True, "rope_interleave": False, "rope_interleaved": False}


def parse_rope(
    fields: Fields,
    *,
    head_dim: int,
    head_dim_name: str = "head_dim",
    partial_rotary_factor: float | None = None,
    layer_types: Sequence[str] = ("full_attention",),
    kinds: Collection[RopeKind] = COMMON_KINDS,
    default_theta: float | None = None,
) -> RopeConfig:
    """Read the rotary settings of one layer type.

    `head_dim_name` is the field that states `head_dim`, for messages. `partial_rotary_factor` is the part of a head
    that rotates, from 0 to 1; `None` uses the stated factor, or 1. Where the settings are nested per layer type, the
    first of `layer_types` that the file has is read. `kinds` are the RoPE kinds that the family supports.
    `default_theta` is used if the file states no `rope_theta`; without it the field is mandatory. Raises
    `CheckpointError` for another kind, a missing theta, a missing or wrong scaling parameter, and an odd `rotary_dim`.
    """
    section = _rope_section(fields, layer_types)
    if partial_rotary_factor is None:
        partial_rotary_factor = stated_partial_rotary_factor(fields, layer_types)
    joined = fields.joined(*section.locations)
    for name, supported in _PAIRING_FIELDS.items():
        if joined.boolean(name, default=supported) is not supported:
            raise joined.error(name, not supported, str(supported).lower())
    kind = _kind(section, kinds)
    theta = _theta(fields, section, kind, default_theta)
    rotary_factor = 1.0 if partial_rotary_factor is None else partial_rotary_factor
    if kind == "proportional":
        head_dim = _rotary_dim(fields, head_dim_name, head_dim, 1.0, kind)
        pairs = int(rotary_factor * head_dim // 2)
        factor = section.number("factor", minimum=1, default=1.0)
        return RopeConfig(theta=theta, rotary_dim=head_dim, kind=kind, factor=factor, rotating_pairs=pairs)
    rope = RopeConfig(
        theta=theta,
        rotary_dim=_rotary_dim(fields, head_dim_name, head_dim, rotary_factor, kind),
        kind=kind,
    )
    if kind == "default":
        section.ignore("original_max_position_embeddings")  # used by scaled rotations only
        return rope
    rope = dataclasses.replace(rope, factor=section.number("factor", minimum=1))
    if kind == "linear":
        original = section.integer("original_max_position_embeddings", minimum=1, default=0)
        return dataclasses.replace(rope, original_max_position_embeddings=original)
    return _yarn(fields, section, rope) if kind == "yarn" else _llama3(section, rope)


def stated_partial_rotary_factor(fields: Fields, layer_types: Sequence[str] = ("full_attention",)) -> float | None:
    """The stated `partial_rotary_factor`, in (0, 1], from the rotary settings or beside them; `None` if not stated.

    Raises `CheckpointError` for a value out of range.
    """
    joined = fields.joined(*_rope_section(fields, layer_types).locations)
    return joined.number("partial_rotary_factor", above=0, maximum=1, default=None)


def theta_choice(
    fields: Fields, layer_types: Sequence[str], theta: float, name: str = "rope_theta"
) -> tuple[Choice, ...]:
    """The choice `name` of the default `theta`, if the file states no `rope_theta`; otherwise no choice."""
    if _rope_section(fields, layer_types).joined(*fields.locations).has("rope_theta"):
        return ()
    return (Choice(name=name, value=str(theta), reason=DEFAULT_REASON),)


def usable_length(stated: int, rope: RopeConfig, file: Path | str) -> int:
    """The largest context length of a model in tokens. `stated` is its `max_position_embeddings`.

    A yarn or linear rotation extends the original length by `factor`. Some configs still state the original length in
    `max_position_embeddings`, so the larger of both is used. A llama3 rotation is not counted, because its factor is
    not a ratio of lengths. Neither is a linear rotation without an original length, because files differ in whether
    `max_position_embeddings` is the original or the extended length. Raises `CheckpointError` beyond int32.
    """
    if rope.kind not in ("yarn", "linear"):
        return stated
    length = max(stated, int(rope.factor * rope.original_max_position_embeddings))
    if length > INT32_MAX:
        raise field_error(
            file, "factor", rope.factor, f"at most {INT32_MAX} / {rope.original_max_position_embeddings}, within int32"
        )
    return length


def default_attention_factor(factor: float) -> float:
    """The attention factor of a yarn rotation that does not state it: 0.1 ln(factor) + 1 (YaRN, arXiv 2309.00071)."""
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
    """The settings of a yarn rotation. The default of the original context length is `max_position_embeddings`."""
    # `attn_factor` multiplies the default attention factor, `attention_factor` replaces it.
    multiplier = section.number("attn_factor", above=0, default=1.0)
    if section.has("attn_factor") and section.has("attention_factor"):
        raise section.error("attn_factor", multiplier, "no such field beside attention_factor")
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
    default = default_attention_factor(rope.factor)
    return dataclasses.replace(
        rope,
        beta_slow=slow,
        beta_fast=fast,
        attention_factor=section.number("attention_factor", above=0, default=multiplier * default),
        original_max_position_embeddings=original or fields.integer("max_position_embeddings", minimum=1),
    )


def _rope_section(fields: Fields, layer_types: Sequence[str]) -> Fields:
    """The settings of one layer type, from `rope_parameters` and `rope_scaling`."""
    sections = [section for name in ("rope_parameters", "rope_scaling") for section in fields.section(name).locations]
    entries = [_layer_type_entry(section, layer_types) for section in sections]
    return entries[0].joined(*entries[1:])


def _layer_type_entry(section: Fields, layer_types: Sequence[str]) -> Fields:
    """The first of `layer_types` that is nested in `section`; `section` itself if nothing is nested."""
    nested = [name for name, value in section.raw.items() if isinstance(value, Mapping)]
    if not nested:
        return section
    chosen = next((name for name in layer_types if name in nested), None)
    if chosen is None:
        raise field_error(section.file, section.prefix, nested, f"an entry for {' or '.join(layer_types)}")
    # Some writers repeat the values of one layer type, or the kind `default`, beside the nested objects. They are
    # ignored.
    repeated = (
        name
        for name, value in section.raw.items()
        if value == "default" or (name not in nested and any(section.raw[kind].get(name) == value for kind in nested))
    )
    section.ignore(*repeated, *(name for name in _LAYER_TYPES if name != chosen))
    return section.section(chosen)


def _kind(section: Fields, kinds: Collection[RopeKind]) -> RopeKind:
    """The RoPE kind, one of `kinds`; `default` if the file states no kind and no scaling."""
    stated = [(section.dotted_path(name), section.string(name)) for name in ("rope_type", "type") if section.has(name)]
    scaled = next((name for name in _SCALING_FIELDS if section.has(name)), None)
    if not stated and scaled is not None:
        raise section.missing("rope_type", f"{', '.join(kinds)}, as {scaled} is stated")
    name = agreed(section.file, stated) if stated else "default"
    for kind in kinds:
        if name == kind:
            return kind
    where = stated[0][0] if stated else section.dotted_path("rope_type")
    raise field_error(section.file, where, name, f"{', '.join(kinds)} as RoPE type")


def _theta(fields: Fields, section: Fields, kind: RopeKind, default: float | None) -> float:
    joined = section.joined(*fields.locations)
    if not joined.has("rope_theta"):
        if default is not None:
            return default
        raise missing_field(
            fields.file, f"{section.prefix}.rope_theta or rope_theta", f"a finite number > 1 (RoPE type {kind!r})"
        )
    return joined.number("rope_theta", above=1)


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
