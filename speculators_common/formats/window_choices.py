"""The choices where the window fields of a config leave something open or say different things.

`layer_types` decides which layers have a window. The older fields are read where it is missing; beside it they may say
something else, because writers copy them from other configs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from dspark_jax.speculators_common.errors import shown
from dspark_jax.speculators_common.formats.choice import DEFAULT_REASON, Choice
from dspark_jax.speculators_common.formats.fields import Fields

FULL, SLIDING = "full_attention", "sliding_attention"
FIRST_SLIDING_LAYER = 28  # default of `max_window_layers` in Qwen3 configs


def types_text(types: Sequence[str]) -> str:
    """The layer types in a few words."""
    count = sum(layer_type == SLIDING for layer_type in types)
    if count in (0, len(types)):
        return f"{SLIDING if count else FULL} in every layer"
    return f"{SLIDING} in {count} of {len(types)} layers"


def layer_types_decide(types: Sequence[str], others: Mapping[str, object]) -> tuple[Choice, ...]:
    """The choice for a file whose fields `others` say something else than its `layer_types`; empty without any."""
    said = " and ".join(f"{name} {json.dumps(value)}" for name, value in others.items())
    reason = f"the file says {said} too; layer_types decides"
    return (Choice(name="layer_types", value=types_text(types), reason=reason),) if others else ()


def default_types(types: Sequence[str]) -> Choice:
    """The choice for a file that states no layer types in any way."""
    return Choice(name="layer_types", value=types_text(types), reason=DEFAULT_REASON)


def unused(fields: Fields, name: str) -> Choice:
    """The choice for a field about sliding layers in a file without such a layer."""
    return Choice(name=name, value="not used", reason=f"the file says {_stated(fields, name)}, and no layer slides")


def draft_window_choices(
    joined: Fields, network: Fields, types: Sequence[str], *, allowed: Sequence[str], is_swa: bool
) -> tuple[Choice, ...]:
    """The choices about the windows of draft layers of these `types`.

    `joined` and `network` are the objects that `read_layer_masks` reads, `allowed` the layer types of the format.
    `is_swa` says that `use_swa` gives every layer its window.
    """
    uses_window = network.boolean("use_sliding_window", default=None)
    if SLIDING not in allowed:
        reason = "the file says true, as copied from a target; the layers of this format are full"
        return (Choice(name="use_sliding_window", value="false", reason=reason),) if uses_window else ()
    first = network.integer("max_window_layers", minimum=0, default=FIRST_SLIDING_LAYER)
    choices: list[Choice] = []
    if not network.has("layer_types"):
        if uses_window is None and not is_swa:
            choices.append(default_types(types))
        if uses_window and not network.has("max_window_layers"):
            choices.append(Choice(name="max_window_layers", value=str(first), reason=DEFAULT_REASON))
    elif SLIDING in types:
        stated = {"use_sliding_window": uses_window, "use_swa": joined.boolean("use_swa", default=None)}
        choices += layer_types_decide(types, {name: value for name, value in stated.items() if value is False})
    elif uses_window and not is_swa and first < len(types):
        choices += layer_types_decide(types, {"use_sliding_window": True})
    if is_swa:
        choices += _other_swa_window(joined)
    elif SLIDING not in types and uses_window is not False and joined.has("sliding_window"):
        choices.append(unused(joined, "sliding_window"))
    return tuple(choices)


def causality_choices(
    joined: Fields, *, causal: bool | None, non_causal: bool | None, slides: bool, is_swa: bool
) -> tuple[Choice, ...]:
    """The choices about the causality of draft layers that state it twice, or in vain.

    `slides` says that `layer_types` has sliding layers. `causal` is that of every layer, `non_causal` is
    `sliding_window_non_causal`; `None`: the file does not state it.
    """
    if (slides or is_swa) and causal is not None and causal == non_causal:
        reason = f"the file says sliding_window_non_causal {json.dumps(non_causal)} too; causal decides"
        return (Choice(name="causal", value=f"{json.dumps(causal)} in every layer", reason=reason),)
    if non_causal and not slides and not is_swa:
        return (unused(joined, "sliding_window_non_causal"),)
    return ()


def _other_swa_window(joined: Fields) -> list[Choice]:
    """The choice of one of the two windows of a draft with `use_swa`, if they differ."""
    if not (joined.has("swa_window_size") and joined.has("sliding_window")):
        return []
    window = joined.integer("swa_window_size", minimum=1)
    other = _stated(joined, "sliding_window")
    if other == str(window):
        return []
    reason = f"the file says sliding_window {other} too; swa_window_size decides beside use_swa"
    return [Choice(name="swa_window_size", value=str(window), reason=reason)]


def _stated(fields: Fields, name: str) -> str:
    """The first stated value of `name`, for a reason."""
    found = next(location.raw[name] for location in fields.locations if location.raw.get(name) is not None)
    return json.dumps(found) if isinstance(found, bool) else shown(found)
