"""The fields of a config that no reader asked for: listed, or refused where their name says that they change the
network.

A misspelt or new field may be harmless. One whose name speaks of a window, of causality, of the rotation, of a scale,
of a bias or of a norm is not: whoever wrote it runs another network than the one that would be built here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from dspark_jax.speculators_common.errors import field_error
from dspark_jax.speculators_common.formats.fields import Fields

# What a name speaks of, and the parts by which that is told: of the lower-case name with words joined by underscores,
# and one at either end.
_TOPICS: Mapping[str, tuple[str, ...]] = {
    "a window": (
        *("window", "sliding", "_swa_", "layer_types", "attention_chunk", "local_attention", "attention_span"),
        *("_sink_", "_sinks_"),
    ),
    "causality": ("causal", "mask", "bidirection", "is_decoder", "is_encoder_decoder", "prefix_lm"),
    "rotation": (
        *("rope", "rotary", "theta", "partial", "yarn", "_ntk_", "alibi"),
        *("position_embedding", "positional", "relative_position"),
    ),
    "a scale": (
        *("scale", "scaling", "scalar", "multiplier", "temperature", "softcap", "soft_cap", "_cap_", "_capping_"),
        *("_clip_", "clamp", "alpha", "_mup_"),
    ),
    "a bias": ("bias",),
    "a norm": ("norm", "_eps_", "_epsilon_"),
}
_NAMES_OF_TOKENS = "mask_token"
# Names that libraries write, with the values at which they say what holds here anyway.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention_factor": (1,),
    "bidirectional": (False,),
    "factor": (1,),  # of a rotation that is not scaled
    "finetuned": (True, False),  # how a yarn model was made
    "is_decoder": (False,),  # a default that old writers spell out
    "is_encoder_decoder": (False,),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
}
# Names whose value 1 changes nothing, and names whose value false does.
_FACTORS = re.compile(r"(scale|scaling|multiplier|temperature)s?$")
_SWITCHES = re.compile(r"bias|^(use|enable|add)_.*(window|swa|sliding|sink|multiplier|scaling|clip)")


def unknown_fields(
    fields: Fields, harmless: Collection[str] = (), neutral: Mapping[str, tuple[Any, ...]] | None = None
) -> tuple[str, ...]:
    """Dotted paths of the stated fields that nobody read, without those that libraries are known to write.

    `harmless` are names without influence. `neutral` are further names, each with the values that are without
    influence. Raises `CheckpointError` for a field whose name says that it changes the network, at any depth: such a
    field is never left out of account.
    """
    known = {**_NEUTRAL, **(neutral or {})}
    listed = []
    for path, value in fields.unread_items(harmless):
        stated = list(_leaves(path, value))
        for leaf, found in stated:
            topic = _topic(leaf)
            if topic is not None and not _is_neutral(leaf, found, known):
                raise field_error(
                    fields.file, leaf, found, f"no such field: its name speaks of {topic}, and nothing here reads it"
                )
        if any(not _is_neutral(leaf, found, known) for leaf, found in stated) or not stated:
            listed.append(path)
    return tuple(listed)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Path and value of every stated field at and below `path`."""
    if isinstance(value, Mapping) and value:
        for name, below in value.items():
            yield from _leaves(f"{path}.{name}", below)
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(f"{path}[{index}]", item)
    elif value is not None:
        yield path, value


def _topic(path: str) -> str | None:
    """What the name, or that of an object around it, speaks of."""
    names = [f"_{_plain(name).replace(_NAMES_OF_TOKENS, '')}_" for name in path.split(".")]
    return next((topic for topic, parts in _TOPICS.items() for name in names for part in parts if part in name), None)


def _is_neutral(path: str, value: Any, known: Mapping[str, tuple[Any, ...]]) -> bool:
    name = _plain(path.rpartition(".")[2])
    if value in ({}, []) or any(type(value) is type(same) and value == same for same in known.get(name, ())):
        return True
    if isinstance(value, bool):
        return not value and _SWITCHES.search(name) is not None
    is_number = isinstance(value, (int, float))
    return is_number and value == 1 and (1 in known.get(name, ()) or _FACTORS.search(name) is not None)


def _plain(name: str) -> str:
    """`normEps[0]` -> `norm_eps`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", re.sub(r"\[\d+\]$", "", name)).lower()
