"""The registry: models by their Hugging Face architecture name.

Each family has a folder beside this file. The `arch.py` of the folder declares the family: its `ARCHITECTURES` are the
registry entries. The registry finds the folders by itself, there is no list of them. Other packages add families
through the entry-point group `dspark_jax.architectures`: the name of the entry point is the architecture name, and its
object is a `SupportedArchitecture`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from dspark_jax.architectures.decoder.recurrent_state import REASON, has_recurrent_name
from dspark_jax.speculators_common.errors import CheckpointError, DSparkError
from dspark_jax.speculators_common.formats.recipes import Recipe

ENTRY_POINT_GROUP = "dspark_jax.architectures"
CONFIG_FILE = "config.json"
_PACKAGE = __name__.rpartition(".")[0]
# Known drafts that are not supported: part of the architecture name, in lower case -> their name in messages.
_UNSUPPORTED_DRAFTS = {"deepseekv4": "DeepSeek-V4", "dflash2": "DFlash2", "eagle": "Eagle"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupportedArchitecture:
    """The registry entry of one architecture: everything the pipeline needs to load, run and save its models.

    `parse_config(raw, file, overrides)` returns the family's frozen config. `overrides` are `DraftOverrides` for a
    draft and `None` for a target.
    `build(config, dtype=..., platform=...)` constructs the module for a `Platform`. It is only traced abstractly, so
    the arrays that it creates take no memory.
    `recipes(config, names)` are the weight recipes for a checkpoint with the tensors `names`, by parameter path.
    `ignored(config)` are the names of tensors that a checkpoint may store and the module does not use. `name.*` means
    all tensors whose names begin with `name.`.
    `write_config(config, dtype=...)` is the inverse of `parse_config`, for drafts: file name -> content of that JSON
    file. `dtype` is the numpy name of the tensors' dtype; a format that states no dtype ignores it.

    The other fields find the entry for a config that names no architecture. `model_types` maps values of the config's
    `type_field` to architecture names. `draft_fields` are top-level fields that only drafts of this kind state: a
    config with one of them belongs to a draft, whatever its `model_type` says.
    `config_file` is the file that `parse_config` reads. If its name is not `config.json` and a directory has such a
    file, the directory holds this architecture.
    """

    name: str
    kind: Literal["target", "draft"]
    family: str
    parse_config: Callable[..., Any]
    build: Callable[..., Any]
    recipes: Callable[[Any, Collection[str]], Mapping[str, Recipe]]
    ignored: Callable[[Any], Collection[str]] = lambda config: ()
    aliases: tuple[str, ...] = ()
    model_types: Mapping[str, str] = dataclasses.field(default_factory=dict)
    type_field: str = "model_type"
    draft_fields: Collection[str] = ()
    config_file: str = CONFIG_FILE
    write_config: Callable[..., Mapping[str, Mapping[str, Any]]] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The name and its aliases."""
        return (self.name, *self.aliases)


_entries: dict[str, SupportedArchitecture] = {}


def register(entry: SupportedArchitecture, *, override: bool = False) -> SupportedArchitecture:
    """Add `entry` under its name and aliases, and return it.

    Raises `DSparkError` if one of the names is taken, unless `override` is true.
    """
    taken = [name for name in entry.names if name in known_names()]
    if taken and not override:
        raise DSparkError(f"architecture {taken[0]!r} is registered already; pass override=True to replace it")
    _entries.update(dict.fromkeys(entry.names, entry))
    return entry


def retrieve(name: str) -> SupportedArchitecture:
    """The entry registered as `name`. Entries of other packages are imported on first use.

    Raises `CheckpointError` for an unknown name and `DSparkError` for an entry point that cannot be loaded.
    """
    if name in _entries:
        return _entries[name]
    if name in built_in():
        return built_in()[name]
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            _entries[name] = _loaded_entry(point)
            return _entries[name]
    raise CheckpointError(unknown_name_message(name))


def implied_name(config: Mapping[str, Any]) -> str | None:
    """The architecture of a config that names none, found by its other fields; `None` if no family recognises it."""
    entries = [retrieve(name) for name in known_names()]
    # A draft's config may state the `model_type` of its target, so the fields of drafts are checked first.
    drafts = [entry for entry in entries if any(config.get(field) is not None for field in entry.draft_fields)]
    for entry in drafts or entries:
        stated = config.get(entry.type_field)
        if isinstance(stated, str) and stated in entry.model_types:
            return entry.model_types[stated]
    return None


def own_config_files(*, of_others: bool = False) -> Mapping[str, str]:
    """Config file names other than `config.json` -> the architecture of a directory that has such a file.

    Entries of other packages are imported and included only if `of_others` is true.
    """
    names = known_names() if of_others else (*_entries, *built_in())
    entries = [retrieve(name) for name in names]
    return {entry.config_file: entry.name for entry in entries if entry.config_file != CONFIG_FILE}


def known_names() -> tuple[str, ...]:
    """Every name that `retrieve` accepts, sorted. No other package is imported for this."""
    third_party = {point.name for point in entry_points(group=ENTRY_POINT_GROUP)}
    return tuple(sorted({*_entries, *built_in(), *third_party}))


@functools.cache
def built_in() -> Mapping[str, SupportedArchitecture]:
    """Name -> entry of every family in a folder beside this file.

    All families are imported together, because any of them may recognise a config. On two cores this takes 0.11 s,
    while JAX and Flax take 2.4 s. A pair alone needs 0.06 s of it. Raises `DSparkError` if two families declare one
    name.
    """
    folders = [found.name for found in pkgutil.iter_modules(sys.modules[_PACKAGE].__path__) if found.ispkg]
    entries = [
        entry
        for folder in folders
        if importlib.util.find_spec(f"{_PACKAGE}.{folder}.arch") is not None
        for entry in importlib.import_module(f"{_PACKAGE}.{folder}.arch").ARCHITECTURES
    ]
    named: dict[str, SupportedArchitecture] = {}
    for entry in entries:
        for name in entry.names:
            if name in named:
                raise DSparkError(f"architecture {name!r}: declared by {named[name].family} and by {entry.family}")
            named[name] = entry
    return named


def unknown_name_message(name: str) -> str:
    """The error message for an unknown architecture name.

    It says why the architecture is not supported, or which known name is the nearest, and lists all known names.
    """
    known = known_names()
    if has_recurrent_name(name):
        return f"unsupported architecture {name!r}: {REASON}; known: {', '.join(known)}"
    title = next((title for part, title in _UNSUPPORTED_DRAFTS.items() if part in name.lower()), None)
    if title is not None:
        return f"unsupported architecture {name!r}: {title} drafts are not supported; known: {', '.join(known)}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"unknown architecture {name!r}{hint}; known: {', '.join(known)}"


def _loaded_entry(point: EntryPoint) -> SupportedArchitecture:
    try:
        entry = point.load()
    except Exception as error:
        raise DSparkError(f"entry point {point.name!r} ({point.value}): {error}") from error
    if not isinstance(entry, SupportedArchitecture):
        raise DSparkError(
            f"entry point {point.name!r} ({point.value}): found {type(entry).__name__}, allowed SupportedArchitecture"
        )
    return entry
