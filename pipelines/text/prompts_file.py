"""Files of prompts: one prompt a line, or JSONL whose objects hold a `prompt`, `messages` or `turns`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from dspark_jax.pipelines.text.messages import check_parts, checked_messages
from dspark_jax.speculators_common.errors import RequestError

_FIELDS = ("prompt", "messages", "turns")
_ALLOWED = "an object with one of prompt, messages and turns"
_TEXT = "a text that is not blank, or a list of text parts"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilePrompt:
    """One prompt of a file. `place` is `FILE:LINE`, for messages. `later_turns` were in the line and are left out."""

    content: str | list[dict[str, Any]]
    place: str
    later_turns: int = 0


def read_prompts_file(path: Path | str) -> list[FilePrompt]:
    """The prompts in the order of the file; empty lines are none. A name that ends in `.jsonl` says which of the two
    formats it is.

    A line of JSONL is an object with exactly one of `prompt` (a text, or a list of text parts), `messages` (a
    conversation, see `checked_messages`) and `turns` (the user's messages, of which the first is the prompt); other
    fields are ignored. Raises `RequestError` that names the file and the line.
    """
    file = Path(path)
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")  # not splitlines: prompts may hold other separators
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RequestError(f"{file}: cannot be read: {reason}") from error
    is_jsonl = file.suffix == ".jsonl"
    prompts = [
        _of_json(line, f"{file}:{number}") if is_jsonl else FilePrompt(content=line.strip(), place=f"{file}:{number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise RequestError(f"{file}: found no prompt, allowed one a line")
    return prompts


def _of_json(line: str, place: str) -> FilePrompt:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{place}: not valid JSON, allowed {_ALLOWED}") from error
    if not isinstance(entry, dict):
        raise RequestError(f"{place}: found a {type(entry).__name__}, allowed {_ALLOWED}")
    found = [field for field in _FIELDS if entry.get(field) is not None]
    if len(found) != 1:
        raise RequestError(f"{place}: found {' and '.join(found) or 'none of them'}, allowed {_ALLOWED}")
    value = entry[found[0]]
    if found[0] == "prompt":
        return FilePrompt(content=_content(value, place, "prompt"), place=place)
    if not isinstance(value, list) or not value:
        allowed = "a list of messages" if found[0] == "messages" else "a list that begins with a text"
        raise RequestError(file=place, field=found[0], found=value, allowed=allowed)
    if found[0] == "turns":
        return FilePrompt(content=_content(value[0], place, "turns[0]"), place=place, later_turns=len(value) - 1)
    try:
        return FilePrompt(content=checked_messages(value), place=place)
    except RequestError as error:
        raise error.at(place) from error


def _content(value: object, place: str, field: str) -> str | list[dict[str, Any]]:
    """A text, or a list of text parts, which is the content of a user message."""
    if isinstance(value, str) and value.strip():
        return value
    if not isinstance(value, list) or not value:
        raise RequestError(file=place, field=field, found=value, allowed=_TEXT)
    try:
        check_parts(value, field)
    except RequestError as error:
        raise error.at(place) from error
    return [{"role": "user", "content": value}]
