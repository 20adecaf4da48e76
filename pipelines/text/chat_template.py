"""Chat templates: the Jinja text that a checkpoint ships, rendered in a sandbox, because it is code that came with a
download.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes

from dspark_jax.speculators_common.errors import RequestError


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A template and what it is rendered with. `source` is the file it came from; `tokens` are variables such as
    `bos_token`.
    """

    text: str
    source: str
    tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def render(self, messages: Sequence[object], *, add_generation_prompt: bool = True) -> str:
        """The conversation as one text. Raises `RequestError` for malformed messages and for whatever the template
        itself raises.

        A message is an object with the strings `role` and `content`; it usually comes out of a request's JSON, so its
        types are checked here.
        """
        variables = {**self.tokens, "messages": _checked(messages), "tools": None, "documents": None}
        try:
            return self._compiled.render(**variables, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # the template is foreign code: it can raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RequestError(f"{self.source}: chat template: {reason}") from error

    @functools.cached_property
    def _compiled(self) -> jinja2.Template:
        return _environment().from_string(self.text)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what training learns from; rendering passes the body through."""

    tags = {"generation"}  # noqa: RUF012 (the base class wants a plain set)

    def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@functools.cache
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _checked(messages: Sequence[object]) -> list[dict[str, Any]]:
    if not messages:
        raise RequestError("messages: found none, allowed at least one object with role and content")
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(
                f"messages[{index}]: found a {type(message).__name__}, allowed an object with role and content"
            )
        for field in ("role", "content"):
            if not isinstance(message.get(field), str):
                raise RequestError(f"messages[{index}].{field}: found {message.get(field)!r}, allowed a string")
        checked.append(dict(message))
    return checked
