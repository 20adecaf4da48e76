"""Reads the tokenizer in a GGUF file: byte-level BPE that splits digits (`smollm`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dspark_jax.pipelines.text.chat_template import ChatTemplate
from dspark_jax.speculators_common.errors import CheckpointError, field_error
from dspark_jax.speculators_common.files.gguf_header import GGUFHeader

_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types
_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GGUFTokenizer:
    """The tokenizer and the chat template of a GGUF file."""

    backend: tokenizers.Tokenizer
    tokens: Mapping[str, str]  # `bos_token` and other special tokens by name
    add_bos: bool | None  # None: not stated
    add_eos: bool | None
    chat_template: ChatTemplate | None


def read_gguf_tokenizer(header: GGUFHeader) -> GGUFTokenizer:
    """The tokenizer of the file with this header. Raises `CheckpointError` for other kinds of tokenizers."""
    words = _gguf_list(header, "tokenizer.ggml.tokens", str)
    if len(set(words)) != len(words):
        raise CheckpointError(
            "found a token twice, allowed distinct tokens",
            file=header.path,
            field="tokenizer.ggml.tokens",
            allowed="distinct tokens",
        )
    ids = {key: header.get(f"tokenizer.ggml.{key}_token_id", int) for key in _NAMES}
    for key, token in ids.items():
        if token is not None and not 0 <= token < len(words):
            allowed = f"0 to {len(words) - 1}, the tokens of the file"
            raise field_error(header.path, f"tokenizer.ggml.{key}_token_id", token, allowed)
    tokens = {_NAMES[key]: words[token] for key, token in ids.items() if token is not None}
    template = header.get("tokenizer.chat_template", str)
    return GGUFTokenizer(
        backend=_gguf_backend(header, words),
        tokens=tokens,
        add_bos=_flag(header, "bos", tokens),
        add_eos=_flag(header, "eos", tokens),
        chat_template=None if template is None else ChatTemplate(template, str(header.path), tokens),
    )


def _flag(header: GGUFHeader, end: str, tokens: Mapping[str, str]) -> bool | None:
    key = f"tokenizer.ggml.add_{end}_token"
    flag = header.get(key, bool)
    if flag and _NAMES[end] not in tokens:
        raise field_error(header.path, key, flag, f"false where tokenizer.ggml.{end}_token_id is missing")
    return flag


def _gguf_backend(header: GGUFHeader, words: list[str]) -> tokenizers.Tokenizer:
    for key, allowed in (("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "smollm")):
        if header.require(key, str) != allowed:
            raise field_error(
                header.path, key, header.metadata[key], f"{allowed!r}; other tokenizers need the Hugging Face directory"
            )
    kinds = _gguf_list(header, "tokenizer.ggml.token_type", int)
    merges = [tuple(merge.split(" ")) for merge in _gguf_list(header, "tokenizer.ggml.merges", str)]
    if len(kinds) != len(words):
        raise field_error(
            header.path, "tokenizer.ggml.token_type", f"{len(kinds)} entries", f"{len(words)}, one per token"
        )
    try:
        backend = tokenizers.Tokenizer(
            models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=merges)
        )
    except Exception as error:  # the library raises plain Exception, for example for a merge of unknown tokens
        raise CheckpointError(str(error), file=header.path, field="tokenizer.ggml.merges") from error
    single_digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([single_digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([word for word, kind in zip(words, kinds, strict=True) if kind == _CONTROL])
    backend.add_tokens([word for word, kind in zip(words, kinds, strict=True) if kind == _USER_DEFINED])
    return backend


def _gguf_list(header: GGUFHeader, key: str, kind: type) -> list[Any]:
    values: list[Any] = header.require(key, list)
    if not all(type(value) is kind for value in values):
        allowed = f"a list of {kind.__name__}"
        raise CheckpointError(f"found other entries, allowed {allowed}", file=header.path, field=key, allowed=allowed)
    return values
