"""The tokenizer and the chat template of a checkpoint, from a Hugging Face directory or a GGUF file."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from dspark_jax.pipelines.checkpoint_data import Checkpoint
from dspark_jax.pipelines.text.byte_fallback import has_byte_fallback, without_cut_characters
from dspark_jax.pipelines.text.chat_template import ChatTemplate
from dspark_jax.pipelines.text.gguf_tokenizer import read_gguf_tokenizer
from dspark_jax.pipelines.text.library_errors import library_errors_as
from dspark_jax.pipelines.text.prompt_ends import PromptEnds
from dspark_jax.pipelines.text.stream_decoder import StreamDecoder
from dspark_jax.pipelines.text.tokenizer_files import read_tokenizer_files
from dspark_jax.speculators_common.errors import RequestError
from dspark_jax.speculators_common.files.gguf_header import GGUFHeader, read_gguf_header


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """The tokenizer of a checkpoint.

    `bos_token` and `eos_token` are the spellings of the tokens that begin and end a text, if the model names them.
    `add_bos` and `add_eos` say whether a plain prompt gets these tokens. `None` means: for BOS, what the tokenizer's
    post-processor does; for EOS, no.
    """

    backend: tokenizers.Tokenizer = dataclasses.field(repr=False)
    source: str  # the file, for errors
    bos_token: str | None = None
    eos_token: str | None = None
    add_bos: bool | None = None
    add_eos: bool | None = None
    chat_template: ChatTemplate | None = dataclasses.field(default=None, repr=False)

    @classmethod
    def from_directory(cls, directory: Path | str) -> Tokenizer | None:
        """The tokenizer of a Hugging Face directory; `None` if it has no tokenizer.json.

        Raises `CheckpointError` for a malformed file.
        """
        files = read_tokenizer_files(Path(directory))
        if files is None:
            return None
        return cls(
            backend=files.backend,
            source=files.source,
            bos_token=files.tokens.get("bos_token"),
            eos_token=files.tokens.get("eos_token"),
            add_bos=files.add_bos,
            add_eos=files.add_eos,
            chat_template=files.chat_template,
        )

    @classmethod
    def from_gguf(cls, gguf: Path | str | GGUFHeader) -> Tokenizer:
        """The tokenizer in a GGUF file: byte-level BPE that splits digits (`smollm`).

        Raises `CheckpointError` for other kinds.
        """
        header = gguf if isinstance(gguf, GGUFHeader) else read_gguf_header(gguf)
        stored = read_gguf_tokenizer(header)
        return cls(
            backend=stored.backend,
            source=str(header.path),
            bos_token=stored.tokens.get("bos_token"),
            eos_token=stored.tokens.get("eos_token"),
            add_bos=stored.add_bos,
            add_eos=stored.add_eos,
            chat_template=stored.chat_template,
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model's embedding may have more rows (padding)."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    @property
    def bos_id(self) -> int | None:
        """The id of the begin-of-text token, if the tokenizer names one."""
        return self.token_id(self.bos_token) if self.bos_token is not None else None

    @property
    def eos_id(self) -> int | None:
        """The id of the end-of-text token, if the tokenizer names one."""
        return self.token_id(self.eos_token) if self.eos_token is not None else None

    def token_id(self, token: str) -> int | None:
        """The id of the token that is spelled `token`, or `None`."""
        found: int | None = self.backend.token_to_id(token)
        return found

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt, with BOS if the model wants one.

        Special tokens spelled in `text` become their ids. A text that begins with BOS does not get a second one. Raises
        `RequestError` for text that is not valid Unicode, or that the tokenizer cannot express.
        """
        return self._ends.around(self._ids(text))

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of `ids`, without special tokens if `skip_special`.

        Bytes that are not valid UTF-8 become replacement characters. Ids beyond the vocabulary are left out. Raises
        `RequestError` for values that are not ids.
        """
        with library_errors_as(lambda message: RequestError(f"cannot be decoded: {message}", field="ids")):
            if not self._has_byte_fallback:
                return str(self.backend.decode(list(ids), skip_special_tokens=skip_special))
            found = [self.backend.id_to_token(token) for token in ids]
            skipped = self.special_tokens if skip_special else frozenset()
            tokens = [token for token in found if token is not None and token not in skipped]
            return str(self.backend.decoder.decode(without_cut_characters(tokens)))

    def stream_decoder(self, skip_special: bool = True) -> StreamDecoder:
        """A new decoder for ids that arrive one after the other."""
        return StreamDecoder(lambda ids: self.decode(ids, skip_special))

    def chat(
        self,
        messages: Sequence[object],
        add_generation_prompt: bool = True,
        template_vars: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a conversation, a list of `{"role": ..., "content": ...}`, in the model's chat format.

        No special token is added, because the template writes them all. `template_vars` are further variables of the
        template. Raises `RequestError` if there is no template or if it refuses the messages.
        """
        if self.chat_template is None:
            raise RequestError(
                "the model has no chat template; send a plain prompt instead of messages", file=self.source
            )
        return self._ids(
            self.chat_template.render(
                messages, add_generation_prompt=add_generation_prompt, template_vars=template_vars
            )
        )

    def _ids(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # lone surrogates
            raise RequestError(f"not valid Unicode text: {error}", field="prompt") from error
        with library_errors_as(lambda message: RequestError(f"cannot be encoded: {message}", field="prompt")):
            return list(self.backend.encode(text, add_special_tokens=False).ids)

    @functools.cached_property
    def _ends(self) -> PromptEnds:
        return PromptEnds.of(self.backend, bos=self.bos_id, eos=self.eos_id, add_bos=self.add_bos, add_eos=self.add_eos)

    @functools.cached_property
    def _has_byte_fallback(self) -> bool:
        return has_byte_fallback(self.backend)

    @functools.cached_property
    def special_tokens(self) -> frozenset[str]:
        """The tokens that `decode` leaves out, such as the end of a turn."""
        return frozenset(token.content for token in self.backend.get_added_tokens_decoder().values() if token.special)


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    """The tokenizer of `checkpoint`; `None` if its directory has no tokenizer.json. The model then takes ids only."""
    return (
        Tokenizer.from_directory(checkpoint.path)
        if checkpoint.gguf_header is None
        else Tokenizer.from_gguf(checkpoint.gguf_header)
    )
