"""Reads files of prompts: one prompt per line, or JSONL with an object of `prompt`, `messages` or `turns` per line."""

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
    """One prompt of a file: text, or a conversation."""

    content: str | list[dict[str, Any]]
    location: str  # `FILE:LINE`, for errors
    later_turns: int = 0  # number of further turns of the line, which are not used


def read_prompts_file(path: Path | str) -> list[FilePrompt]:
    """The prompts in the order of the file, without empty lines. A file is JSONL if its name ends in `.jsonl`.

    A line of JSONL is an object with exactly one of `prompt` (a text, or a list of text parts), `messages` (a
    conversation, see `checked_messages`) and `turns` (the user's messages, of which the first is the prompt); other
    fields are ignored. Raises a `RequestError` that names the file and the line.
    """
    file = Path(path)
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")  # not splitlines: prompts may hold other separators
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RequestError(f"cannot be read: {reason}", file=file) from error
    is_jsonl = file.suffix == ".jsonl"
    prompts = [
        _of_json(line, f"{file}:{number}")
        if is_jsonl
        else FilePrompt(content=line.strip(), location=f"{file}:{number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise RequestError("found no prompt, allowed one a line", file=file, allowed="one a line")
    return prompts


def _of_json(line: str, location: str) -> FilePrompt:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"not valid JSON, allowed {_ALLOWED}", file=location, found=line, allowed=_ALLOWED
        ) from error
    if not isinstance(entry, dict):
        raise RequestError(
            f"found a {type(entry).__name__}, allowed {_ALLOWED}", file=location, found=entry, allowed=_ALLOWED
        )
    found = [field for field in _FIELDS if entry.get(field) is not None]
    if len(found) != 1:
        names = " and ".join(found) or "none of them"
        raise RequestError(f"found {names}, allowed {_ALLOWED}", file=location, found=names, allowed=_ALLOWED)
    value = entry[found[0]]
    if found[0] == "prompt":
        return FilePrompt(content=_content(value, location, "prompt"), location=location)
    if not isinstance(value, list) or not value:
        allowed = "a list of messages" if found[0] == "messages" else "a list that begins with a text"
        raise RequestError(file=location, field=found[0], found=value, allowed=allowed)
    if found[0] == "turns":
        return FilePrompt(
            content=_content(value[0], location, "turns[0]"), location=location, later_turns=len(value) - 1
        )
    try:
        return FilePrompt(content=checked_messages(value), location=location)
    except RequestError as error:
        raise error.at(location) from error


def _content(value: object, location: str, field: str) -> str | list[dict[str, Any]]:
    """A text, or a list of text parts, which is the content of a user message."""
    if isinstance(value, str) and value.strip():
        return value
    if not isinstance(value, list) or not value:
        raise RequestError(file=location, field=field, found=value, allowed=_TEXT)
    try:
        check_parts(value, field)
    except RequestError as error:
        raise error.at(location) from error
    return [{"role": "user", "content": value}]
