"""Encodes prompts. A prompt is text, a conversation, or a list or numpy array of token ids, which is used as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.pipelines.text.tokenizer import Tokenizer
from dspark_jax.pipelines.text.tokenizer_files import unread_tokenizer
from dspark_jax.speculators_common.errors import RequestError

Message = Mapping[str, Any]  # {"role": ..., "content": ...}, see `checked_messages`
Prompt = str | Sequence[int] | Sequence[Message] | np.ndarray
_ALLOWED = "text, a list of token ids or a list of messages"


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """A list of prompts from one prompt or several. A list of ids or of messages is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items = _items(prompts)
    if not items:
        raise RequestError(
            f"found none, allowed {_ALLOWED}, or a list of such", field="prompts", found=prompts, allowed=_ALLOWED
        )
    return [items] if _is_id(items[0]) or isinstance(items[0], Mapping) else items


def encode_prompt(
    prompt: Prompt,
    tokenizer: Tokenizer | None,
    *,
    raw: bool = False,
    system: str | None = None,
    template_vars: Mapping[str, Any] | None = None,
    source: str = "the target",
) -> list[int]:
    """Token ids of one prompt.

    Text becomes a user message in the model's chat format, after the system message `system` if there is one. With
    `raw`, or for a tokenizer without chat template, text is encoded as it is. Messages are always rendered by the
    template; ids are returned as they are. `template_vars` are further variables of the template, such as
    `enable_thinking`. Raises `RequestError` for an empty prompt, for text or messages without a tokenizer (`source`
    names the model), and for `system` or `template_vars` where no template is rendered.
    """
    if not isinstance(prompt, str):
        items = _items(prompt)
        if items and all(_is_id(item) for item in items):
            _refuse_system(system, "token ids")
            _refuse_variables(template_vars, "token ids")
            return [int(item) for item in items]
        if not items or not all(isinstance(item, Mapping) for item in items):
            raise RequestError(
                f"found {_described(items)}, allowed {_ALLOWED}", field="prompt", found=items, allowed=_ALLOWED
            )
        _refuse_system(system, "messages")
        return _tokenizer(tokenizer, source, "messages").chat(items, template_vars=template_vars)
    if not prompt.strip():
        allowed = "at least one character that is not blank"
        raise RequestError(f"found no text, allowed {allowed}", field="prompt", found=prompt, allowed=allowed)
    tokenizer = _tokenizer(tokenizer, source, "text")
    if raw or tokenizer.chat_template is None:
        _refuse_system(system, "text that goes in without a chat template")
        _refuse_variables(template_vars, "text that goes in without a chat template")
        return tokenizer.encode(prompt)
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return tokenizer.chat(messages, template_vars=template_vars)


def _items(value: Any) -> list[Any]:
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return list(value.tolist())
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise RequestError(
            f"found a {type(value).__name__}, allowed {_ALLOWED}", field="prompt", found=value, allowed=_ALLOWED
        )
    return list(value)


def _is_id(item: object) -> bool:
    return hasattr(item, "__index__") and not isinstance(item, bool) and getattr(item, "ndim", 0) == 0


def _described(items: list[Any]) -> str:
    kinds = sorted({type(item).__name__ for item in items})
    return f"a list of {' and '.join(kinds)}" if kinds else "an empty list"


def _tokenizer(tokenizer: Tokenizer | None, source: str, found: str) -> Tokenizer:
    if tokenizer is None:
        reason = unread_tokenizer(Path(source)) or "has no tokenizer"
        raise RequestError(
            f"found {found}, allowed token ids: {source} {reason}", field="prompt", found=found, allowed="token ids"
        )
    return tokenizer


def _refuse_system(system: str | None, beside: str) -> None:
    if system is not None:
        raise RequestError(
            f"found a system message beside {beside}, allowed beside text in a chat format",
            field="system",
            found=system,
            allowed="beside text in a chat format",
        )


def _refuse_variables(template_vars: Mapping[str, Any] | None, beside: str) -> None:
    if template_vars:
        names = ", ".join(template_vars)
        raise RequestError(
            f"found {names} beside {beside}, allowed where a chat template is rendered",
            field="template_vars",
            found=names,
            allowed="where a chat template is rendered",
        )
