"""Reads a Hugging Face tokenizer: tokenizer.json and the files beside it, of newer and older exports."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from dspark_jax.pipelines.text.chat_template import ChatTemplate
from dspark_jax.pipelines.text.library_errors import library_errors_as
from dspark_jax.speculators_common.errors import CheckpointError, collected_error, field_error
from dspark_jax.speculators_common.files.json_file import read_json_object

TOKENIZER_FILE = "tokenizer.json"
_CONFIG, _SPECIAL_MAP, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_TEMPLATE, _TEMPLATE_JSON = "chat_template.jinja", "chat_template.json"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_ENDS = ("bos_token", "eos_token")  # made special tokens, so that texts leave them out
_OTHER_FORMATS = ("tokenizer.model", "vocab.json", "spiece.model", "tiktoken.model")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """The tokenizer and the chat template of one directory."""

    backend: tokenizers.Tokenizer
    source: str  # tokenizer.json, for errors
    tokens: Mapping[str, str]  # `bos_token` and other special tokens by name
    add_bos: bool | None  # None: not stated
    add_eos: bool | None
    chat_template: ChatTemplate | None


def read_tokenizer_files(directory: Path) -> TokenizerFiles | None:
    """The tokenizer of `directory`; `None` without a tokenizer.json. Raises `CheckpointError` for a malformed file."""
    file = directory / TOKENIZER_FILE
    if not file.is_file():
        return None
    with library_errors_as(lambda message: CheckpointError(f"not a valid tokenizer: {message}", file=file)):
        backend = tokenizers.Tokenizer.from_file(str(file))
    # Files often contain the limits of the last training run, which would cut or pad prompts.
    backend.no_truncation()
    backend.no_padding()
    config, special_map = _optional(directory / _CONFIG), _optional(directory / _SPECIAL_MAP)
    tokens = {**_special_tokens(special_map, directory / _SPECIAL_MAP), **_special_tokens(config, directory / _CONFIG)}
    _add_missing_tokens(backend, directory, config)
    _make_special(backend, [tokens[name] for name in _ENDS if name in tokens])
    flags = {name: _flag(config, directory / _CONFIG, name, tokens) for name in _ENDS}
    return TokenizerFiles(
        backend=backend,
        source=str(file),
        tokens=tokens,
        add_bos=flags["bos_token"],
        add_eos=flags["eos_token"],
        chat_template=_chat_template(directory, config, tokens),
    )


def unread_tokenizer(directory: Path) -> str:
    """The end of an error message about a tokenizer of another kind in `directory`; empty if there is none."""
    other = next((name for name in _OTHER_FORMATS if (directory / name).is_file()), None)
    if other is None:
        return ""
    return (
        f"has {other} but no {TOKENIZER_FILE}, the only kind that is read (transformers writes one: "
        "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR))"
    )


def _optional(file: Path) -> dict[str, Any]:
    return read_json_object(file) if file.is_file() else {}


def _special_tokens(config: Mapping[str, Any], file: Path) -> dict[str, str]:
    """The special tokens by name. Files store each as text or as an object with `content`."""
    tokens = {}
    for name in _SPECIAL_TOKENS:
        stored = config.get(name)
        text = stored.get("content") if isinstance(stored, dict) else stored
        if text is None and not isinstance(stored, dict):
            continue
        if not isinstance(text, str):
            raise field_error(file, name, stored, "a string or an object with content")
        tokens[name] = text
    return tokens


def _flag(config: Mapping[str, Any], file: Path, token: str, tokens: Mapping[str, str]) -> bool | None:
    """`add_bos_token` or `add_eos_token`."""
    name = f"add_{token}"
    flag = config.get(name)
    if flag is not None and not isinstance(flag, bool):
        raise field_error(file, name, flag, "true, false or null")
    if flag and token not in tokens:
        raise field_error(file, name, flag, f"false where no file names a {token}")
    return flag


def _add_missing_tokens(backend: tokenizers.Tokenizer, directory: Path, config: Mapping[str, Any]) -> None:
    """Add the tokens that older exports store only beside tokenizer.json."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    faults = []
    for index, token in sorted(_added_tokens(directory, config), key=lambda entry: entry[0]):
        found = backend.token_to_id(token.content)
        if token.content in known or found not in (None, index):
            continue  # tokenizer.json takes precedence
        backend.add_tokens([token])
        if backend.token_to_id(token.content) != index:
            faults.append(
                f"added token {token.content!r}: found id {index}, allowed the first id after {TOKENIZER_FILE}"
            )
    if faults:
        raise collected_error(directory, faults)


def _added_tokens(directory: Path, config: Mapping[str, Any]) -> Iterator[tuple[int, tokenizers.AddedToken]]:
    """(id, token) from `added_tokens_decoder` of tokenizer_config.json, and from added_tokens.json."""
    file = directory / _CONFIG
    stored = config.get("added_tokens_decoder") or {}
    allowed = "an object of ids and tokens with content"
    if not isinstance(stored, dict):
        raise field_error(file, "added_tokens_decoder", stored, allowed)
    named = set()
    for index, entry in stored.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not index.isascii() or not index.isdigit() or not isinstance(content, str):
            raise field_error(file, "added_tokens_decoder", {index: entry}, allowed)
        named.add(content)
        flags = {name: entry.get(name) is True for name in ("lstrip", "rstrip", "single_word", "special")}
        yield int(index), tokenizers.AddedToken(content, normalized=entry.get("normalized") is True, **flags)
    for content, identifier in _optional(directory / _ADDED).items():
        if type(identifier) is not int or identifier < 0:
            raise field_error(directory / _ADDED, content, identifier, "a token id")
        if content not in named:
            yield identifier, tokenizers.AddedToken(content, normalized=False)


def _make_special(backend: tokenizers.Tokenizer, names: list[str]) -> None:
    """Make those of `names` special that are ordinary words of the vocabulary."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [name for name in names if name not in special and backend.token_to_id(name) is not None]
    backend.add_special_tokens([tokenizers.AddedToken(name, normalized=False, special=True) for name in missing])


def _chat_template(directory: Path, config: Mapping[str, Any], tokens: Mapping[str, str]) -> ChatTemplate | None:
    """chat_template.jinja, else that of tokenizer_config.json, else that of chat_template.json (multimodal exports)."""
    file = directory / _TEMPLATE
    if file.is_file():
        try:
            return ChatTemplate(file.read_text(encoding="utf-8"), str(file), tokens)
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"cannot be read: {error}", file=file) from error
    file = directory / _CONFIG
    text = _template_text(config, file)
    if text is None:
        file = directory / _TEMPLATE_JSON
        text = _template_text(_optional(file), file)
    return None if text is None else ChatTemplate(text, str(file), tokens)


def _template_text(config: Mapping[str, Any], file: Path) -> str | None:
    """The field `chat_template`: one template, or a list or an object of named ones, of which `default` is used."""
    stored = config.get("chat_template")
    if isinstance(stored, list | dict):
        entries = [entry for entry in stored if isinstance(entry, dict)] if isinstance(stored, list) else []
        named = dict(stored) if isinstance(stored, dict) else {e.get("name"): e.get("template") for e in entries}
        stored = named.get("default")
        if stored is None:
            raise field_error(file, "chat_template", sorted(map(str, named)), "a list with a template named 'default'")
    if stored is not None and not isinstance(stored, str):
        raise field_error(file, "chat_template", type(stored).__name__, "a string or a list of named templates")
    return stored
