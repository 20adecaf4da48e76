"""Fields of a config that were not read: they are listed, or refused if they change the network.

A misspelt or new field may have no effect, so it is only listed. A field whose name mentions a window, causality, the
rotation, a scale, a bias or a norm is refused, except at a value that changes nothing: its writer used another network
than the one that would be built here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from dspark_jax.speculators_common.errors import field_error
from dspark_jax.speculators_common.formats.fields import Fields

# Topic -> parts of names that belong to it. A part is searched in the lower-case name, whose words are joined by
# underscores and which has one more underscore at each end.
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
_TOKEN_NAMES = "mask_token"  # a field about a token, not about an attention mask
# Fields that libraries write -> values that change nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attention_factor": (1,),
    "bidirectional": (False,),
    "factor": (1,),  # 1: the rotation is not scaled
    "finetuned": (True, False),  # training history of a yarn model
    "is_decoder": (False,),  # old writers state this default
    "is_encoder_decoder": (False,),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
}
# Names for which the value 1 changes nothing, and names for which the value false changes nothing. A factor of
# attention scores is none of the first: it stands for 1 / sqrt(head_dim). A negated name is none of the second.
_FACTORS = re.compile(r"^(?!.*(attention|attn|softmax|query|qk)).*(scale|scaling|multiplier|temperature)s?$")
_NEGATED = re.compile(r"(^|_)(no|non|not|without|disable|disabled|remove|removed|skip|drop|omit)_")
_SWITCHES = re.compile(r"bias|^(use|enable|add)_.*(window|swa|sliding|sink|multiplier|scaling|clip)")


def unknown_fields(
    fields: Fields, harmless: Collection[str] = (), neutral: Mapping[str, tuple[object, ...]] | None = None
) -> tuple[str, ...]:
    """Dotted paths of the stated fields that were not read, without the harmless ones.

    `harmless` are names of fields that never change the network. `neutral` maps further names to the values that change
    nothing. Raises `CheckpointError` for an unread field, at any depth, whose name belongs to one of the topics that
    change the network.
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


def _leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
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
    """The topic of the field's name or of the name of an object around it; `None` if they have no topic."""
    names = [f"_{_plain(name).replace(_TOKEN_NAMES, '')}_" for name in path.split(".")]
    return next((topic for topic, parts in _TOPICS.items() for name in names for part in parts if part in name), None)


def _is_neutral(path: str, value: object, known: Mapping[str, tuple[object, ...]]) -> bool:
    """Whether the field at `path` changes nothing at this `value`. `known` maps names to such values."""
    name = _plain(path.rpartition(".")[2])
    if value in ({}, []) or any(type(value) is type(same) and value == same for same in known.get(name, ())):
        return True
    if isinstance(value, bool):
        return not value and _SWITCHES.search(name) is not None and _NEGATED.search(name) is None
    is_number = isinstance(value, (int, float))
    return is_number and value == 1 and (1 in known.get(name, ()) or _FACTORS.search(name) is not None)


def _plain(name: str) -> str:
    """The name in snake case without a list index: `normEps[0]` -> `norm_eps`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", re.sub(r"\[\d+\]$", "", name)).lower()
