"""What the block slots of each draft layer may see: its window and its causality, from all the fields that speak of
them.

Writers say it in different ways. `layer_types` names the kind of each layer; `use_sliding_window` and
`max_window_layers` stand for it in files of Qwen3's form that leave it out. `use_swa` puts a window on every layer of a
draft without sliding layers. `causal` (z-lab: `is_causal`) decides for all layers, whatever their kind.
"""

from __future__ import annotations

from collections.abc import Sequence

from dspark_jax.speculators_common.formats.draft_config import LayerMask
from dspark_jax.speculators_common.formats.fields import Fields, agreed

FULL, SLIDING = "full_attention", "sliding_attention"
_FIRST_SLIDING_LAYER = 28  # `max_window_layers` of a Qwen3 file that does not say


def read_layer_masks(
    block: Fields, network: Fields, num_layers: int, *, kinds: Sequence[str] = (FULL, SLIDING)
) -> tuple[LayerMask, ...]:
    """Window and causality of each layer.

    `block` and `network` are the places of the block's values and of the network's; a field counts wherever it lies.
    `kinds` are the layer kinds of the format. Full layers are bidirectional and sliding ones causal, unless
    `sliding_window_non_causal` or `causal` says otherwise. Raises `CheckpointError` for a missing window, for values
    that disagree, and for a window that no layer would have.
    """
    everywhere = network.joined(*(place for place in block.places if place.prefix not in _prefixes(network)))
    types = _layer_types(network, num_layers, kinds)
    causal = _causal(everywhere)
    non_causal = everywhere.boolean("sliding_window_non_causal", default=False)
    forced = everywhere.boolean("use_swa", default=False) and SLIDING not in types
    window = _swa_window(everywhere) if forced else _window(everywhere, types)
    return tuple(
        LayerMask(
            window=window if forced or kind == SLIDING else None,
            causal=(kind == SLIDING and not non_causal) if causal is None else causal,
        )
        for kind in types
    )


def _prefixes(fields: Fields) -> tuple[str, ...]:
    return tuple(place.prefix for place in fields.places)


def _layer_types(network: Fields, num_layers: int, kinds: Sequence[str]) -> tuple[str, ...]:
    """The kind of every layer. `use_sliding_window` repeats what `layer_types` says, and speaks where that is
    missing.
    """
    uses_window = network.boolean("use_sliding_window", default=False)
    first = network.integer("max_window_layers", minimum=0, default=_FIRST_SLIDING_LAYER)
    default = (FULL,) * num_layers
    if uses_window and SLIDING in kinds:
        default = tuple(SLIDING if layer >= first else FULL for layer in range(num_layers))
    stated = network.string_list("layer_types", allowed=kinds, default=default)
    if len(stated) != num_layers:
        raise network.error(
            "layer_types", list(stated), f"one entry for each of {num_layers} layers (num_hidden_layers)"
        )
    return stated


def _causal(everywhere: Fields) -> bool | None:
    stated = [(everywhere.label(name), everywhere.boolean(name, default=None)) for name in ("causal", "is_causal")]
    stated = [(path, value) for path, value in stated if value is not None]
    return agreed(everywhere.file, stated) if stated else None


def _window(everywhere: Fields, types: Sequence[str]) -> int | None:
    """The window of the sliding layers; without such a layer a `sliding_window` is a leftover and has no meaning."""
    everywhere.ignore("sliding_window", "swa_window_size")
    if SLIDING not in types:
        if everywhere.has("swa_window_size") and not everywhere.has("use_swa"):
            raise everywhere.error(
                "swa_window_size", _first(everywhere, "swa_window_size"), "use_swa or a sliding layer beside it"
            )
        return None
    names = [name for name in ("sliding_window", "swa_window_size") if everywhere.has(name)]
    if not names:
        raise everywhere.missing("sliding_window", f"an integer >= 1, as layer_types {list(types)} has sliding layers")
    return agreed(everywhere.file, [(everywhere.label(name), everywhere.integer(name, minimum=1)) for name in names])


def _swa_window(everywhere: Fields) -> int:
    """The window that `use_swa` puts on every layer."""
    everywhere.ignore("sliding_window", "swa_window_size")
    for name in ("swa_window_size", "sliding_window"):
        if everywhere.has(name):
            return everywhere.integer(name, minimum=1)
    raise everywhere.missing("swa_window_size", "an integer >= 1, here or as sliding_window, as use_swa is true")


def _first(fields: Fields, name: str) -> object:
    return next(place.raw[name] for place in fields.places if place.raw.get(name) is not None)
