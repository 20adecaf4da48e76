"""Chat templates: the Jinja template of a checkpoint, rendered in a sandbox because it is foreign code."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
from jinja2 import nodes

from dspark_jax.pipelines.text.messages import checked_messages, joined_parts
from dspark_jax.speculators_common.errors import RequestError

_RESERVED = frozenset({"messages", "add_generation_prompt"})  # variables that `render` sets itself
_PROBE = "one part of text"


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A chat template."""

    text: str
    source: str  # the file it came from, for messages
    tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)  # variables such as `bos_token`

    def render(
        self,
        messages: Sequence[object],
        *,
        add_generation_prompt: bool = True,
        template_vars: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as one text.

        `messages` have the form that `checked_messages` checks; all their keys reach the template. Lists of text parts
        are passed on if the template reads such lists, else the parts are joined. `template_vars` are further variables
        of the template, such as `enable_thinking`. Raises `RequestError` for malformed messages, for a variable that
        the template never reads, and for every error of the template itself.
        """
        checked = checked_messages(messages)
        if any(isinstance(message.get("content"), list) for message in checked) and not self._reads_parts:
            checked = joined_parts(checked)
        if template_vars:
            self._check_variables(template_vars)
        return self._rendered(checked, add_generation_prompt, template_vars or {})

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """The variables that the template reads but does not set. Raises `RequestError` for a malformed template."""
        environment = _environment()
        try:
            names = jinja2.meta.find_undeclared_variables(environment.parse(self.text))
        except jinja2.TemplateError as error:
            raise self._fault(error) from error
        return frozenset(names).difference(environment.globals)

    @functools.cached_property
    def fault(self) -> RequestError | None:
        """The error that every rendering raises because the template does not compile; `None` if it compiles."""
        try:
            _environment().compile(self.text)
        except Exception as error:  # besides syntax errors, for example a RecursionError
            return self._fault(error)
        return None

    @functools.cached_property
    def _compiled(self) -> jinja2.Template:
        return _environment().from_string(self.text)

    @functools.cached_property
    def _reads_parts(self) -> bool:
        """Whether the template reads the text in a list of parts. Others print the list, fail, or leave it out."""
        message = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
        try:
            text = self._rendered([message], True, {})
        except RequestError:
            return False
        return _PROBE in text and "'type'" not in text and '"type"' not in text

    def _rendered(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool, template_vars: Mapping[str, Any]
    ) -> str:
        variables = {**self.tokens, "tools": None, "documents": None, **template_vars, "messages": messages}
        try:
            return self._compiled.render(**variables, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template can raise any exception
            raise self._fault(error) from error

    def _check_variables(self, template_vars: Mapping[str, Any]) -> None:
        allowed = self.variables - _RESERVED
        for name in template_vars:
            if name not in allowed:
                raise RequestError(
                    field="template_vars",
                    found=name,
                    allowed=f"a variable that the template reads: {', '.join(sorted(allowed)) or 'it reads none'}",
                )

    def _fault(self, error: Exception) -> RequestError:
        reason = " ".join(str(error).split()) or type(error).__name__
        return RequestError(reason, file=self.source, field="chat template")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training. Rendering keeps only the body."""

    tags = {"generation"}  # noqa: RUF012 (the base class wants a plain set)

    def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@functools.cache
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _Generation],
        finalize=_without_none,
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


def _without_none(value: Any) -> Any:
    # Jinja would print the word None for a content of null.
    return "" if value is None else value


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
