"""Text to ids and back: the tokenizer and the chat template of a checkpoint, from a Hugging Face directory or a GGUF
file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from dspark_jax.pipelines.checkpoints.checkpoint_data import Checkpoint
from dspark_jax.pipelines.checkpoints.gguf_file import GGUFHeader, read_gguf_header
from dspark_jax.pipelines.text.chat_template import ChatTemplate
from dspark_jax.pipelines.text.stream_decoder import StreamDecoder
from dspark_jax.speculators_common.errors import CheckpointError, RequestError, field_error
from dspark_jax.speculators_common.files.json_file import read_json_object

_TOKENIZER, _TOKENIZER_CONFIG, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A checkpoint's own tokenizer. `source` is the file that errors name; `chat_template` is `None` for models without
    one.
    """

    backend: tokenizers.Tokenizer = dataclasses.field(repr=False)
    source: str
    eos_token: str | None = None
    chat_template: ChatTemplate | None = dataclasses.field(default=None, repr=False)

    @classmethod
    def from_directory(cls, directory: Path | str) -> Tokenizer | None:
        """The tokenizer of a Hugging Face directory, or `None` if it has no tokenizer.json. Raises `CheckpointError`
        for a malformed one.
        """
        file = Path(directory) / _TOKENIZER
        if not file.is_file():
            return None
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{file}: not a valid tokenizer: {error}") from error
        # Files often keep the limits of the last training run, which would cut or pad prompts.
        backend.no_truncation()
        backend.no_padding()
        config_file = Path(directory) / _TOKENIZER_CONFIG
        config = read_json_object(config_file) if config_file.is_file() else {}
        tokens = _special_tokens(config, config_file)
        return cls(
            backend=backend,
            source=str(file),
            eos_token=tokens.get("eos_token"),
            chat_template=_directory_template(config, config_file, tokens),
        )

    @classmethod
    def from_gguf(cls, gguf: Path | str | GGUFHeader) -> Tokenizer:
        """The tokenizer in a GGUF file: byte-level BPE with single digits (`smollm`). Raises `CheckpointError` for
        other kinds.
        """
        header = gguf if isinstance(gguf, GGUFHeader) else read_gguf_header(gguf)
        words = _gguf_list(header, "tokenizer.ggml.tokens", str)
        if len(set(words)) != len(words):
            raise CheckpointError(f"{header.path}: tokenizer.ggml.tokens: found a token twice, allowed distinct tokens")
        ids = {key: header.get(f"tokenizer.ggml.{key}_token_id", int) for key in ("bos", "eos", "unknown", "padding")}
        for key, token in ids.items():
            if token is not None and not 0 <= token < len(words):
                raise field_error(
                    header.path,
                    f"tokenizer.ggml.{key}_token_id",
                    token,
                    f"0 to {len(words) - 1}, the tokens of the file",
                )
        known_as = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
        tokens = {known_as[key]: words[token] for key, token in ids.items() if token is not None}
        template = header.get("tokenizer.chat_template", str)
        return cls(
            backend=_gguf_backend(header, words, tokens.get("bos_token")),
            source=str(header.path),
            eos_token=tokens.get("eos_token"),
            chat_template=None if template is None else ChatTemplate(template, str(header.path), tokens),
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model's embedding may have more rows (padding)."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    @property
    def eos_id(self) -> int | None:
        """The id of the end-of-text token, if the tokenizer names one."""
        return self.token_id(self.eos_token) if self.eos_token is not None else None

    def token_id(self, token: str) -> int | None:
        """The id of the token that is spelled `token`, or `None`."""
        found: int | None = self.backend.token_to_id(token)
        return found

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt, with BOS if the tokenizer adds one. Special tokens spelled in `text` become
        their ids.
        """
        return self._ids(text, add_special_tokens=True)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are no valid UTF-8 become replacement characters, ids beyond the vocabulary
        become nothing.
        """
        try:
            return str(self.backend.decode(list(ids), skip_special_tokens=skip_special))
        except (OverflowError, TypeError) as error:
            raise RequestError(f"ids: cannot be decoded: {error}") from error

    def stream_decoder(self, skip_special: bool = True) -> StreamDecoder:
        """A new decoder for ids that arrive one after the other."""
        return StreamDecoder(lambda ids: self.decode(ids, skip_special))

    def chat(self, messages: Sequence[object], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation, a list of `{"role": ..., "content": ...}`, in the model's chat format.

        The template writes every special token itself, so none is added here. Raises `RequestError` if there is no
        template or if it refuses the messages.
        """
        if self.chat_template is None:
            raise RequestError(
                f"{self.source}: the model has no chat template; send a plain prompt instead of messages"
            )
        return self._ids(
            self.chat_template.render(messages, add_generation_prompt=add_generation_prompt), add_special_tokens=False
        )

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (UnicodeEncodeError, TypeError) as error:  # a lone surrogate is no text
            raise RequestError(f"prompt: not valid Unicode text: {error}") from error


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    """The tokenizer beside or inside `checkpoint`; `None` if a directory has none (ids still work)."""
    return (
        Tokenizer.from_directory(checkpoint.path)
        if checkpoint.gguf_header is None
        else Tokenizer.from_gguf(checkpoint.gguf_header)
    )


def stop_ids(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Ids that end a generation: those of generation_config, else of config or its text part, else the tokenizer's;
    empty if none is declared.
    """
    generation_file = checkpoint.path / "generation_config.json" if checkpoint.path.is_dir() else checkpoint.path
    text = checkpoint.config.get("text_config")
    configs = [(checkpoint.generation_config, str(generation_file)), (checkpoint.config, checkpoint.config_file)]
    if isinstance(text, dict):
        configs.append((text, checkpoint.config_file))
    for config, file in configs:
        declared = config.get("eos_token_id")
        if declared is not None:
            ids = declared if isinstance(declared, list) else [declared]
            if not all(type(token) is int and token >= 0 for token in ids):
                raise field_error(file, "eos_token_id", declared, "a token id or a list of token ids")
            if ids:
                return tuple(dict.fromkeys(ids))
    eos = tokenizer.eos_id if tokenizer is not None else None
    return () if eos is None else (eos,)


def _special_tokens(config: dict[str, Any], file: Path) -> dict[str, str]:
    """`bos_token` and its like, stored as the text or as an object that holds it."""
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


def _directory_template(config: dict[str, Any], config_file: Path, tokens: dict[str, str]) -> ChatTemplate | None:
    """chat_template.jinja, else the `chat_template` of tokenizer_config.json: one text, or a list of named ones."""
    file = config_file.parent / _TEMPLATE
    if file.is_file():
        try:
            return ChatTemplate(file.read_text(encoding="utf-8"), str(file), tokens)
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from error
    stored = config.get("chat_template")
    if isinstance(stored, list):
        named = {entry.get("name"): entry.get("template") for entry in stored if isinstance(entry, dict)}
        stored = named.get("default")
        if stored is None:
            raise field_error(
                config_file, "chat_template", sorted(map(str, named)), "a list with a template named 'default'"
            )
    if stored is None:
        return None
    if not isinstance(stored, str):
        raise field_error(config_file, "chat_template", type(stored).__name__, "a string or a list of named templates")
    return ChatTemplate(stored, str(config_file), tokens)


def _gguf_backend(header: GGUFHeader, words: list[str], bos_token: str | None) -> tokenizers.Tokenizer:
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
        raise CheckpointError(f"{header.path}: tokenizer.ggml.merges: {error}") from error
    single_digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([single_digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([word for word, kind in zip(words, kinds, strict=True) if kind == _CONTROL])
    backend.add_tokens([word for word, kind in zip(words, kinds, strict=True) if kind == _USER_DEFINED])
    if header.get("tokenizer.ggml.add_bos_token", bool, False) and bos_token is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=[bos_token, "$A"], special_tokens=[(bos_token, backend.token_to_id(bos_token))]
        )
    return backend


def _gguf_list(header: GGUFHeader, key: str, kind: type) -> list[Any]:
    values: list[Any] = header.require(key, list)
    if not all(type(value) is kind for value in values):
        raise CheckpointError(f"{header.path}: {key}: found other entries, allowed a list of {kind.__name__}")
    return values
