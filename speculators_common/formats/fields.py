"""Typed reading of JSON configs. A wrong or missing value raises an error that names the file and the dotted field.

The JSON is read directly. A config class of another library would fill in its own defaults. A `Fields` remembers which
fields were read, so that the unread ones can be listed afterwards. A value may be stated in several objects (`joined`).
Then all of them must state the same value.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from dspark_jax.speculators_common.errors import CheckpointError, field_error, missing_field, shown
from dspark_jax.speculators_common.formats.size_limits import FLOAT32_MAX, FLOAT32_TINY, INT32_MAX
from dspark_jax.speculators_common.scalars import is_integer, is_number

T = TypeVar("T")


class Required(enum.Enum):
    """Marks a field without a default: the file must state it."""

    TOKEN = 0


REQUIRED: Literal[Required.TOKEN] = Required.TOKEN


def agreed(file: Path | str, stated: Sequence[tuple[str, T]]) -> T:
    """The value that all `(dotted field path, value)` pairs share.

    Raises a `CheckpointError` that names two paths and their values, if two differ.
    """
    first_path, first = stated[0]
    for path, value in stated[1:]:
        if value != first:
            raise CheckpointError(
                f"{file}: {first_path}: found {shown(first)}, but {path} is {shown(value)}, allowed the same value at "
                "both places"
            )
    return first


@dataclasses.dataclass(frozen=True, eq=False)
class Fields:
    """The fields of one JSON object, or of several that describe the same thing.

    `raw` is the object, `prefix` its dotted path inside the `file`, and `others` are further objects to read from. A
    field that is null counts as not stated. The typed readers return the value, or `default` if the field is not
    stated. A field without a default is mandatory. The readers raise `CheckpointError`.
    """

    raw: Mapping[str, Any]
    file: Path | str
    prefix: str = ""
    others: tuple[Fields, ...] = ()
    # Paths of the fields that were read. A path that ends in a dot is a nested object that was opened.
    seen: set[str] = dataclasses.field(default_factory=set, repr=False)

    @functools.cached_property
    def locations(self) -> tuple[Fields, ...]:
        """One `Fields` for each JSON object that this one reads from, in order."""
        return (dataclasses.replace(self, others=()), *self.others) if self.others else (self,)

    def joined(self, *others: Fields) -> Fields:
        """These fields, read from the objects of `others` too. Empty objects are left out."""
        added = [location for other in others for location in other.locations if location.raw]
        return dataclasses.replace(self, others=(*self.others, *added))

    def section(self, name: str) -> Fields:
        """The nested JSON object `name`, from every location that states it; empty if no location does."""
        found = self._section_locations(name)
        return (
            found[0].joined(*found[1:])
            if found
            else dataclasses.replace(self, raw={}, prefix=self._path(name), others=())
        )

    def sections(self, name: str) -> tuple[Fields, ...]:
        """The JSON objects of the list `name`, with prefixes `name[0]`, `name[1]`, ...; empty if it is not stated."""
        items = self._read(name, _is_list_of(lambda item: isinstance(item, Mapping)), "a list of JSON objects", ())
        path = self.dotted_path(name)
        return tuple(
            dataclasses.replace(self, raw=item, prefix=f"{path}[{i}]", others=()) for i, item in enumerate(items)
        )

    def has(self, name: str) -> bool:
        """Whether any location states `name`, null excluded."""
        return any(location.raw.get(name) is not None for location in self.locations)

    def dotted_path(self, name: str) -> str:
        """The dotted path where `name` is stated. If it is stated nowhere, all paths where it could be."""
        stated = [location._path(name) for location in self.locations if location.raw.get(name) is not None]
        return stated[0] if stated else " or ".join(location._path(name) for location in self.locations)

    def error(self, name: str, found: object, allowed: object) -> CheckpointError:
        """The error for a value of `name` that was read but cannot be used; the caller raises it."""
        return field_error(self.file, self.dotted_path(name), found, allowed)

    def missing(self, name: str, allowed: object) -> CheckpointError:
        """The error for a mandatory field that is not stated; the caller raises it."""
        nulls = [location._path(name) for location in self.locations if name in location.raw]
        return (
            field_error(self.file, nulls[0], None, allowed)
            if nulls
            else missing_field(self.file, self.dotted_path(name), allowed)
        )

    def ignore(self, *names: str) -> None:
        """Count `names` as read. For fields that are known and change nothing."""
        for location in self.locations:
            location.seen.update(location._path(name) for name in names)

    def unread_items(self, harmless: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
        """`(dotted path, value)` of the stated fields that were not read, in file order.

        `harmless` are names, without prefix, that are left out.
        """
        for location in self.locations:
            yield from location._unread(location.raw, location.prefix, frozenset(harmless))

    def integer(
        self,
        name: str,
        *,
        minimum: int | None = None,
        maximum: int | None = None,
        default: T | Literal[Required.TOKEN] = REQUIRED,
    ) -> int | T:
        """A JSON integer within the bounds, ends included, and within int32. `true` and `1.0` are not integers."""
        allowed = "an integer" + _bounds(minimum=minimum, maximum=maximum)
        value: int | T = self._read(
            name, lambda v: is_integer(v) and _within(v, minimum=minimum, maximum=maximum), allowed, default
        )
        if isinstance(value, int) and abs(value) > INT32_MAX:
            raise self.error(name, value, f"{allowed}, within int32")
        return value

    def number(
        self,
        name: str,
        *,
        above: float | None = None,
        minimum: float | None = None,
        maximum: float | None = None,
        default: T | Literal[Required.TOKEN] = REQUIRED,
    ) -> float | T:
        """A finite JSON number `> above`, `>= minimum` and `<= maximum`, within the range of float32; as a float."""
        allowed = "a finite number" + _bounds(above=above, minimum=minimum, maximum=maximum)
        value: float | T = self._read(
            name,
            lambda v: _is_finite(v) and _within(v, above=above, minimum=minimum, maximum=maximum),
            allowed,
            default,
        )
        if isinstance(value, (int, float)) and value != 0 and not FLOAT32_TINY <= abs(value) <= FLOAT32_MAX:
            raise self.error(name, value, f"{allowed}, within the range of float32")
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value

    def boolean(self, name: str, *, default: T | Literal[Required.TOKEN] = REQUIRED) -> bool | T:
        """A JSON `true` or `false`. 0 and 1 are refused."""
        value: bool | T = self._read(name, lambda v: isinstance(v, bool), "true or false", default)
        return value

    def string(
        self, name: str, *, allowed: Collection[str] | None = None, default: T | Literal[Required.TOKEN] = REQUIRED
    ) -> str | T:
        """A JSON string; one of `allowed`, if that is given."""
        expected = "a string" if allowed is None else ", ".join(allowed)
        value: str | T = self._read(
            name, lambda v: isinstance(v, str) and (allowed is None or v in allowed), expected, default
        )
        return value

    def int_list(self, name: str, *, default: T | Literal[Required.TOKEN] = REQUIRED) -> tuple[int, ...] | T:
        """A JSON list of int32 integers, as a tuple."""
        value = self._read(name, _is_list_of(is_integer), "a list of integers", default)
        if isinstance(value, list) and any(abs(item) > INT32_MAX for item in value):
            raise self.error(name, value, "a list of integers, within int32")
        return tuple(value) if isinstance(value, list) else value

    def string_list(
        self, name: str, *, allowed: Collection[str] | None = None, default: T | Literal[Required.TOKEN] = REQUIRED
    ) -> tuple[str, ...] | T:
        """A JSON list of strings as a tuple; each one of `allowed`, if that is given."""
        expected = "a list of strings" if allowed is None else f"a list of {', '.join(allowed)}"
        value = self._read(
            name, _is_list_of(lambda v: isinstance(v, str) and (allowed is None or v in allowed)), expected, default
        )
        return tuple(value) if isinstance(value, list) else value

    def _read(self, name: str, fits: Callable[[Any], bool], allowed: str, default: object) -> Any:
        self.ignore(name)
        stated = [
            (location._path(name), location.raw[name])
            for location in self.locations
            if location.raw.get(name) is not None
        ]
        if not stated and default is REQUIRED:
            raise self.missing(name, allowed)
        for path, value in stated:
            if not fits(value):
                raise field_error(self.file, path, value, allowed)
        return agreed(self.file, stated) if stated else default

    def _section_locations(self, name: str) -> list[Fields]:
        locations = []
        for location in self.locations:
            value, path = location.raw.get(name), location._path(name)
            if value is not None and not isinstance(value, Mapping):
                raise field_error(self.file, path, value, "a JSON object")
            if value is not None:
                location.seen.add(path + ".")
                locations.append(dataclasses.replace(location, raw=value, prefix=path))
        return locations

    def _path(self, name: str) -> str:
        return f"{self.prefix}.{name}" if self.prefix else name

    def _unread(self, raw: Mapping[str, Any], prefix: str, harmless: frozenset[str]) -> Iterator[tuple[str, Any]]:
        for name, value in raw.items():
            path = f"{prefix}.{name}" if prefix else name
            if path + "." in self.seen and isinstance(value, Mapping):
                yield from self._unread(value, path, harmless)
            elif path in self.seen and _is_list_of(lambda item: isinstance(item, Mapping))(value):
                for i, item in enumerate(value):
                    yield from self._unread(item, f"{path}[{i}]", harmless)
            elif value is not None and path not in self.seen and name not in harmless:
                yield path, value


def only_architecture(fields: Fields, *, names: Collection[str] = (), default: str | None = None) -> str:
    """The single name in `architectures`, one of `names` if that is given; `default` if the field is not stated.

    Raises `CheckpointError` for any other name, for a missing field without a `default`, and for a list that does not
    hold exactly one name.
    """
    if default is not None and not fields.has("architectures"):
        return default
    stated = fields.string_list("architectures")
    if len(stated) != 1:
        raise fields.error("architectures", list(stated), "a list of exactly one name")
    if names and stated[0] not in names:
        raise fields.error("architectures", stated[0], ", ".join(names))
    return stated[0]


def _is_finite(value: Any) -> bool:
    # The comparison also refuses NaN, infinities and integers that no float can hold.
    return is_number(value) and abs(value) <= sys.float_info.max


def _is_list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(fits(item) for item in value)


def _within(
    value: float, *, above: float | None = None, minimum: float | None = None, maximum: float | None = None
) -> bool:
    return (
        (above is None or value > above)
        and (minimum is None or value >= minimum)
        and (maximum is None or value <= maximum)
    )


def _bounds(*, above: float | None = None, minimum: float | None = None, maximum: float | None = None) -> str:
    stated = [
        f"{sign} {bound}" for sign, bound in ((">", above), (">=", minimum), ("<=", maximum)) if bound is not None
    ]
    return f" {' and '.join(stated)}" if stated else ""
