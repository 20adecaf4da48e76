"""Models by their Hugging Face architecture name: register and retrieve.

A folder with an `arch.py` is a family, and that file alone declares it: `ARCHITECTURES`, its entries, one for each kind
of file. Folders are found by looking, nothing lists them. Other packages add theirs through the entry-point group
`dspark_jax.architectures`: the entry point's name is the architecture name, its object a `SupportedArchitecture`.
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
from importlib.metadata import entry_points
from typing import Any, Literal

from dspark_jax.architectures.decoder.recurrent_state import REASON, has_recurrent_name
from dspark_jax.speculators_common.errors import CheckpointError, DSparkError
from dspark_jax.speculators_common.formats.recipes import Recipe

ENTRY_POINT_GROUP = "dspark_jax.architectures"
CONFIG_FILE = "config.json"
_PACKAGE = __name__.rpartition(".")[0]
# What an architecture name holds, in lower case -> the drafts that it belongs to, which are known and not supported.
_REFUSED_TITLES = {"deepseekv4": "DeepSeek-V4", "dflash2": "DFlash2", "eagle": "Eagle"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupportedArchitecture:
    """Everything the pipeline needs to run one architecture.

    `parse_config(raw, file, overrides)` gives the family's frozen config (overrides are for drafts, `None` for
    targets). `build(config, dtype=..., platform=...)` constructs the module for a `Platform`; it is only traced
    abstractly, so it may allocate.
    `recipes(config, names)` is the weight table for a checkpoint that holds the tensors `names`; `ignored` are tensor
    names that may be there without use; one that ends in `.*` stands for all names below it. `write_config(config,
    dtype=...)` is the inverse of `parse_config`, for drafts: the content of each JSON file by name, with the numpy name
    of the tensors' dtype where the format states it.

    A config that names no architecture may mean this one: `model_types` is the name by the value of `type_field`.
    `draft_fields` are top-level fields that such drafts state and no target does: a config that has one is of a draft,
    whatever its `model_type` says. `config_file` is the file that `parse_config` reads; a name other than `config.json`
    decides what a directory is wherever it is there.
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
    """Make `entry` known under its name and aliases. A name that is taken is an error unless `override`."""
    taken = [name for name in entry.names if name in known_names()]
    if taken and not override:
        raise DSparkError(f"architecture {taken[0]!r} is registered already; pass override=True to replace it")
    _entries.update(dict.fromkeys(entry.names, entry))
    return entry


def retrieve(name: str) -> SupportedArchitecture:
    """The entry registered as `name`; third-party entries are imported on first use."""
    if name in _entries:
        return _entries[name]
    if name in built_in():
        return built_in()[name]
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            return _adopt(name, _loaded(point))
    raise CheckpointError(unknown_name_message(name))


def implied_name(config: Mapping[str, Any]) -> str | None:
    """The architecture that a config means which names none; `None` if no family claims it."""
    entries = [retrieve(name) for name in known_names()]
    # The `model_type` of a draft is that of its target.
    drafts = [entry for entry in entries if any(config.get(field) is not None for field in entry.draft_fields)]
    for entry in drafts or entries:
        stated = config.get(entry.type_field)
        if isinstance(stated, str) and stated in entry.model_types:
            return entry.model_types[stated]
    return None


def own_config_files(*, of_others: bool = False) -> Mapping[str, str]:
    """Files other than `config.json` that decide what a directory is -> the architecture. Packages of others are
    imported for it only `of_others`.
    """
    names = known_names() if of_others else (*_entries, *built_in())
    entries = [retrieve(name) for name in names]
    return {entry.config_file: entry.name for entry in entries if entry.config_file != CONFIG_FILE}


def known_names() -> tuple[str, ...]:
    """Every name that `retrieve` accepts, sorted; no package of others is imported."""
    third_party = {point.name for point in entry_points(group=ENTRY_POINT_GROUP)}
    return tuple(sorted({*_entries, *built_in(), *third_party}))


@functools.cache
def built_in() -> Mapping[str, SupportedArchitecture]:
    """Name -> entry of every family in a folder beside this file.

    All families are imported together, because a directory is opened by what any of them declares. That takes 0.11 s
    beside the 2.4 s of JAX and Flax on two cores, and a pair needs 0.06 s of it in any case.
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
    """What to tell a user whose architecture is not known: the name, why it cannot be, or the nearest known one, and
    all known ones.
    """
    known = known_names()
    if has_recurrent_name(name):
        return f"unsupported architecture {name!r}: {REASON}; known: {', '.join(known)}"
    title = next((title for part, title in _REFUSED_TITLES.items() if part in name.lower()), None)
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
