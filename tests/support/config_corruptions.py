"""Single faults in a config: every field that it states, with every kind of wrong value."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

from tests.support.config_strategies import Raw

Path = tuple[str | int, ...]


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


WRONG_VALUES: dict[str, Any] = {
    "null": None,
    "text": "text",
    "empty text": "",
    "number as text": "4",
    "true": True,
    "false": False,
    "zero": 0,
    "minus one": -1,
    "three": 3,
    "fraction": 0.5,
    "negative fraction": -0.5,
    "whole float": 4.0,
    "beyond int32": 2**31,
    "beyond int64": 10**30,
    "minus beyond int64": -(10**30),
    "beyond float": 10**400,
    "too many digits": 10**5000,
    "huge float": 1e300,
    "tiny float": 1e-300,
    "nan": math.nan,
    "infinity": math.inf,
    "minus infinity": -math.inf,
    "empty list": [],
    "list": [3, 1],
    "list of mixed": [1, None, "x", {}, math.nan],
    "list of huge": [10**30],
    "deep list": _nested(900),
    "empty object": {},
    "object": {"a": 1},
}


def paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """Every field of a config, and every object and list item below it."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        items = enumerate(value)
    for key, below in items:
        yield (*path, key)
        yield from paths(below, (*path, key))


def field_name(path: Path) -> str:
    """The name of the field that a message must give: the last one on the path."""
    return next(key for key in reversed(path) if isinstance(key, str))


def dotted(path: Path) -> str:
    """The path as messages and lists of unknown fields write it."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


def value_at(raw: Raw, path: Path) -> Any:
    """What the config states at `path`."""
    value: Any = raw
    for key in path:
        value = value[key]
    return value


def replaced(raw: Raw, path: Path, value: Any) -> Raw:
    """A copy with another value at `path`."""
    changed = copy.deepcopy(raw)
    value_at(changed, path[:-1])[path[-1]] = value
    return changed


def removed(raw: Raw, path: Path) -> Raw:
    """A copy without the field or item at `path`."""
    changed = copy.deepcopy(raw)
    del value_at(changed, path[:-1])[path[-1]]
    return changed


def renamed(raw: Raw, path: Path) -> tuple[Raw, Path]:
    """A copy with the field at `path` under a name that no format has, and its new path."""
    changed = copy.deepcopy(raw)
    place = value_at(changed, path[:-1])
    name = f"{path[-1]}_"
    place[name] = place.pop(path[-1])
    return changed, (*path[:-1], name)
