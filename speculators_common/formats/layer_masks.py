"""Reading the window and the causality of each draft layer from a config.

Writers use several fields:
* `layer_types` states the type of each layer, full or sliding.
* `use_sliding_window` and `max_window_layers` state the types in Qwen3 configs without `layer_types`.
* `use_swa` gives every layer a window, in a draft without sliding layers.
* `causal` (also `is_causal`) sets the causality of every layer, whatever its type.

`layer_types` wins over the other fields about windows. Where they say something else, that is a choice.
"""

from __future__ import annotations

from collections.abc import Sequence

from dspark_jax.speculators_common.formats.choice import Choice
from dspark_jax.speculators_common.formats.draft_config import LayerMask
from dspark_jax.speculators_common.formats.fields import Fields, agreed
from dspark_jax.speculators_common.formats.window_choices import (
    FIRST_SLIDING_LAYER,
    FULL,
    SLIDING,
    causality_choices,
    draft_window_choices,
)

__all__ = ["FULL", "SLIDING", "read_layer_masks"]


def read_layer_masks(
    block: Fields, network: Fields, num_layers: int, *, layer_types: Sequence[str] = (FULL, SLIDING)
) -> tuple[tuple[LayerMask, ...], tuple[Choice, ...]]:
    """Read the window and the causality of each of the `num_layers` draft layers, and the choices that were made.

    `block` holds the fields of the block, `network` those of the layers. Each field of this module may be stated in
    either. `layer_types` are the layer types that the format allows. A full layer is bidirectional and a sliding layer
    is causal in the block, unless `sliding_window_non_causal` or `causal` states otherwise. Windows are in tokens.
    Fields that the file leaves open, and fields that another one overrules, are choices. Raises `CheckpointError` for a
    missing window, for values of one field that disagree, and for a `swa_window_size` that applies to no layer.
    """
    joined = network.joined(*(location for location in block.locations if location.prefix not in _prefixes(network)))
    types = _layer_types(network, num_layers, layer_types)
    causal = _causal(joined)
    non_causal = joined.boolean("sliding_window_non_causal", default=None)
    is_swa = joined.boolean("use_swa", default=False) and SLIDING not in types
    window = _swa_window(joined) if is_swa else _window(joined, types)
    masks = tuple(
        LayerMask(
            window=window if is_swa or layer_type == SLIDING else None,
            causal=(layer_type == SLIDING and not non_causal) if causal is None else causal,
        )
        for layer_type in types
    )
    choices = (
        *draft_window_choices(joined, network, types, allowed=layer_types, is_swa=is_swa),
        *causality_choices(joined, causal=causal, non_causal=non_causal, slides=SLIDING in types, is_swa=is_swa),
    )
    return masks, choices


def _prefixes(fields: Fields) -> tuple[str, ...]:
    return tuple(location.prefix for location in fields.locations)


def _layer_types(network: Fields, num_layers: int, allowed: Sequence[str]) -> tuple[str, ...]:
    """The type of every layer: `layer_types`; without that field, `use_sliding_window` and `max_window_layers`."""
    uses_window = network.boolean("use_sliding_window", default=False)
    first = network.integer("max_window_layers", minimum=0, default=FIRST_SLIDING_LAYER)
    default = (FULL,) * num_layers
    if uses_window and SLIDING in allowed:
        default = tuple(SLIDING if layer >= first else FULL for layer in range(num_layers))
    stated = network.string_list("layer_types", allowed=allowed, default=default)
    if len(stated) != num_layers:
        raise network.error(
            "layer_types", list(stated), f"one entry for each of {num_layers} layers (num_hidden_layers)"
        )
    return stated


def _causal(joined: Fields) -> bool | None:
    stated = [(joined.dotted_path(name), joined.boolean(name, default=None)) for name in ("causal", "is_causal")]
    stated = [(path, value) for path, value in stated if value is not None]
    return agreed(joined.file, stated) if stated else None


def _window(joined: Fields, types: Sequence[str]) -> int | None:
    """The window of the sliding layers in tokens, `None` without such a layer.

    Without sliding layers, `sliding_window` is ignored: drafts copy it from the config of their target.
    """
    joined.ignore("sliding_window", "swa_window_size")
    if SLIDING not in types:
        if joined.has("swa_window_size") and not joined.has("use_swa"):
            raise joined.error(
                "swa_window_size", _first(joined, "swa_window_size"), "use_swa or a sliding layer beside it"
            )
        return None
    names = [name for name in ("sliding_window", "swa_window_size") if joined.has(name)]
    if not names:
        raise joined.missing("sliding_window", f"an integer >= 1, as layer_types {list(types)} has sliding layers")
    return agreed(joined.file, [(joined.dotted_path(name), joined.integer(name, minimum=1)) for name in names])


def _swa_window(joined: Fields) -> int:
    """The window of a draft with `use_swa`, the same for every layer, in tokens."""
    joined.ignore("sliding_window", "swa_window_size")
    for name in ("swa_window_size", "sliding_window"):
        if joined.has(name):
            return joined.integer(name, minimum=1)
    raise joined.missing("swa_window_size", "an integer >= 1, here or as sliding_window, as use_swa is true")


def _first(fields: Fields, name: str) -> object:
    """The first stated value of `name`."""
    return next(location.raw[name] for location in fields.locations if location.raw.get(name) is not None)
