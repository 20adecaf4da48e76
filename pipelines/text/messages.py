"""Messages of a conversation, checked: they usually come out of somebody's JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dspark_jax.speculators_common.errors import RequestError

_MESSAGE = "an object with role and content"
_CONTENT = "a string or a list of text parts"


def checked_messages(messages: Sequence[object]) -> list[dict[str, Any]]:
    """The messages as new dictionaries, every key kept as it is. Raises `RequestError` that names the message.

    A message has a `role`, a string, and a `content`: a string, or a list of parts `{"type": "text", "text": ...}`. An
    assistant's message that says something else, such as `tool_calls`, may have no content or a content of `null`.
    """
    if not messages:
        raise RequestError("found none, allowed at least one object with role and content", field="messages")
    return [_checked(message, f"messages[{index}]") for index, message in enumerate(messages)]


def check_parts(content: Sequence[object], place: str) -> None:
    """Raise a `RequestError` unless every part of `content` is text. `place` is what the error calls the content."""
    if not content:
        raise RequestError(field=place, found=content, allowed=_CONTENT)
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else part
        if not isinstance(part, Mapping) or kind != "text":
            what = f"{place}[{index}].type" if isinstance(part, Mapping) else f"{place}[{index}]"
            raise RequestError(field=what, found=kind, allowed="'text': models here read text alone")
        if not isinstance(part.get("text"), str):
            raise RequestError(field=f"{place}[{index}].text", found=part.get("text"), allowed="a string")


def joined_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with each list of text parts as one string, a line end between two parts."""
    return [
        {**message, "content": "\n".join(part["text"] for part in message["content"])}
        if isinstance(message.get("content"), list)
        else dict(message)
        for message in messages
    ]


def _checked(message: object, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{place}: found a {type(message).__name__}, allowed {_MESSAGE}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise RequestError(field=f"{place}.role", found=role, allowed="a string")
    if isinstance(content, list | tuple):
        check_parts(content, f"{place}.content")
        return {**message, "content": [dict(part) for part in content]}
    says_more = any(value is not None for key, value in message.items() if key not in ("role", "content"))
    if content is None and role == "assistant" and says_more:
        return dict(message)
    if not isinstance(content, str):
        raise RequestError(field=f"{place}.content", found=content, allowed=_CONTENT)
    return dict(message)
