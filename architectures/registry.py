"""Models by their Hugging Face architecture name: register and retrieve.

A family adds one entry in its `arch.py`. Other packages add theirs through the entry-point group
`dspark_jax.architectures`: the entry point's name is the architecture name, its object a `SupportedArchitecture`.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import entry_points
from typing import Any, Literal

from dspark_jax.architectures.decoder.recurrent_state import REASON, has_recurrent_name
from dspark_jax.speculators_common.errors import CheckpointError, DSparkError
from dspark_jax.speculators_common.formats.detect import refused_title
from dspark_jax.speculators_common.formats.weight_adapters import Recipe

ENTRY_POINT_GROUP = "dspark_jax.architectures"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupportedArchitecture:
    """Everything the pipeline needs to run one architecture.

    `parse_config(raw, file, overrides)` gives the family's frozen config (overrides are for drafts, `None` for
    targets). `build(config, dtype=..., platform=...)` constructs the module for a `Platform`; it is only traced
    abstractly, so it may allocate.
    `recipes(config, names)` is the weight table for a checkpoint that holds the tensors `names`; `ignored` are tensor
    names that may be there without use; one that ends in `.*` stands for all names below it.
    """

    name: str
    kind: Literal["target", "draft"]
    family: str
    parse_config: Callable[..., Any]
    build: Callable[..., Any]
    recipes: Callable[[Any, Collection[str]], Mapping[str, Recipe]]
    ignored: Callable[[Any], Collection[str]] = lambda config: ()
    aliases: tuple[str, ...] = ()


_entries: dict[str, SupportedArchitecture] = {}
_built_in = {
    "LlamaForCausalLM": "dspark_jax.architectures.llama.arch",
    "Qwen3ForCausalLM": "dspark_jax.architectures.qwen3.arch",
    "Qwen3MoeForCausalLM": "dspark_jax.architectures.qwen3_moe.arch",
    "Gemma3ForCausalLM": "dspark_jax.architectures.gemma3.arch",
    "Gemma3ForConditionalGeneration": "dspark_jax.architectures.gemma3.arch",
    "Gemma4ForCausalLM": "dspark_jax.architectures.gemma4.arch",
    "Gemma4ForConditionalGeneration": "dspark_jax.architectures.gemma4.arch",
    "Gemma4UnifiedForCausalLM": "dspark_jax.architectures.gemma4.arch",
    "Gemma4UnifiedForConditionalGeneration": "dspark_jax.architectures.gemma4.arch",
    "DSparkDraftModel": "dspark_jax.architectures.dspark_draft.arch",
    "DSparkSpeculator": "dspark_jax.architectures.dspark_draft.arch",
    "Qwen3DSparkModel": "dspark_jax.architectures.dspark_deepspec.arch",
    "Gemma4DSparkModel": "dspark_jax.architectures.dspark_deepspec.gemma4_arch",
    "DFlashDraftModel": "dspark_jax.architectures.dflash.arch",
    "DFlashSpeculator": "dspark_jax.architectures.dflash.arch",
    "DsparkDrafter": "dspark_jax.architectures.dspark_compact.arch",
}


def register(entry: SupportedArchitecture, *, override: bool = False) -> SupportedArchitecture:
    """Make `entry` known under its name and aliases. A name that is taken is an error unless `override`."""
    names = (entry.name, *entry.aliases)
    taken = [name for name in names if name in known_names()]
    if taken and not override:
        raise DSparkError(f"architecture {taken[0]!r} is registered already; pass override=True to replace it")
    _entries.update(dict.fromkeys(names, entry))
    return entry


def retrieve(name: str) -> SupportedArchitecture:
    """The entry registered as `name`; built-in and third-party entries are imported on first use."""
    if name in _entries:
        return _entries[name]
    if name in _built_in:
        return _adopt(name, importlib.import_module(_built_in[name]).ARCHITECTURE)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            return _adopt(name, _loaded(point))
    raise CheckpointError(unknown_name_message(name))


def known_names() -> tuple[str, ...]:
    """Every name that `retrieve` accepts, sorted; nothing is imported."""
    third_party = {point.name for point in entry_points(group=ENTRY_POINT_GROUP)}
    return tuple(sorted({*_entries, *_built_in, *third_party}))


def unknown_name_message(name: str) -> str:
    """What to tell a user whose architecture is not known: the name, why it cannot be, or the nearest known one, and
    all known ones.
    """
    known = known_names()
    if has_recurrent_name(name):
        return f"unsupported architecture {name!r}: {REASON}; known: {', '.join(known)}"
    title = refused_title(name)
    if title is not None:
        return f"unsupported architecture {name!r}: {title} drafts are not supported; known: {', '.join(known)}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"unknown architecture {name!r}{hint}; known: {', '.join(known)}"


def _adopt(name: str, entry: SupportedArchitecture) -> SupportedArchitecture:
    _entries[name] = entry
    return entry


def _loaded(point: Any) -> SupportedArchitecture:
    try:
        entry = point.load()
    except Exception as error:
        raise DSparkError(f"entry point {point.name!r} ({point.value}): {error}") from error
    if not isinstance(entry, SupportedArchitecture):
        raise DSparkError(
            f"entry point {point.name!r} ({point.value}): found {type(entry).__name__}, allowed SupportedArchitecture"
        )
    return entry
