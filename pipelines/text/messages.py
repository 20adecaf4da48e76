"""Checks the messages of a conversation, which usually come from JSON of a user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dspark_jax.speculators_common.errors import RequestError

_MESSAGE = "an object with role and content"
_CONTENT = "a string or a list of text parts"


def checked_messages(messages: Sequence[object]) -> list[dict[str, Any]]:
    """Check messages; returns them as new dictionaries with all keys. Raises a `RequestError` that names the message.

    A message has a `role`, a string, and a `content`: a string, or a list of parts `{"type": "text", "text": ...}`. An
    assistant's message with another key, such as `tool_calls`, may have no content or a content of `null`.
    """
    if not messages:
        allowed = "at least one object with role and content"
        raise RequestError(f"found none, allowed {allowed}", field="messages", found=messages, allowed=allowed)
    return [_checked(message, f"messages[{index}]") for index, message in enumerate(messages)]


def check_parts(content: Sequence[object], field: str) -> None:
    """Raise `RequestError` unless every part of `content` is a text part. `field` names the content in errors."""
    if not content:
        raise RequestError(field=field, found=content, allowed=_CONTENT)
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else part
        if not isinstance(part, Mapping) or kind != "text":
            name = f"{field}[{index}].type" if isinstance(part, Mapping) else f"{field}[{index}]"
            raise RequestError(field=name, found=kind, allowed="'text': models here read text alone")
        if not isinstance(part.get("text"), str):
            raise RequestError(field=f"{field}[{index}].text", found=part.get("text"), allowed="a string")


def joined_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with each list of text parts joined to one string, with a line end between two parts."""
    return [
        {**message, "content": "\n".join(part["text"] for part in message["content"])}
        if isinstance(message.get("content"), list)
        else dict(message)
        for message in messages
    ]


def _checked(message: object, field: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(
            f"found a {type(message).__name__}, allowed {_MESSAGE}", field=field, found=message, allowed=_MESSAGE
        )
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise RequestError(field=f"{field}.role", found=role, allowed="a string")
    if isinstance(content, list | tuple):
        check_parts(content, f"{field}.content")
        return {**message, "content": [dict(part) for part in content]}
    has_other_keys = any(value is not None for key, value in message.items() if key not in ("role", "content"))
    if content is None and role == "assistant" and has_other_keys:
        return dict(message)
    if not isinstance(content, str):
        raise RequestError(field=f"{field}.content", found=content, allowed=_CONTENT)
    return dict(message)
