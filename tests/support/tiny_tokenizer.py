"""A byte-level BPE tokenizer of three special tokens, every byte and "hello"."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from dspark_jax.pipelines.checkpoint_data import Checkpoint
from dspark_jax.pipelines.text.tokenizer import Tokenizer

SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>"]
BOS, START, END = 0, 1, 2
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello")]
WORDS = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(merge) for merge in MERGES]
CHATML = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HELLO = [{"role": "user", "content": "hello"}]


def backend() -> tokenizers.Tokenizer:
    """Byte-level BPE with every single byte and "hello"; its post-processor puts BOS in front."""
    made = tokenizers.Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(WORDS)}, merges=MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return made


def loaded(directory: Path, config: Any = None) -> Tokenizer:
    """The tokenizer of `directory`, after writing it there with `config` as tokenizer_config.json."""
    backend().save(str(directory / "tokenizer.json"))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer is not None
    return tokenizer


def byte_ids(text: str) -> list[int]:
    """One token per UTF-8 byte."""
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [WORDS.index(letter) for piece, _ in pieces for letter in piece]


def text_checkpoint(
    directory: Path, config: dict[str, Any] | None = None, generation_config: dict[str, Any] | None = None
) -> Checkpoint:
    """A checkpoint of configs without tensors, as far as text is concerned."""
    return Checkpoint(
        path=directory,
        config=config or {},
        config_file=str(directory / "config.json"),
        generation_config=generation_config or {},
        tensors={},
        tensor_files={},
        architecture="LlamaForCausalLM",
        bytes_on_disk=0,
    )


# --- the SentencePiece style: words begin with "▁", every byte has a token ---

BYTE_WORDS = [
    "<s>",
    "</s>",
    "<unk>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    "▁",
    "▁hello",
    "a",
    "é",
    "\N{REPLACEMENT CHARACTER}",
]
FALLBACK_DECODERS = {
    "llama": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "gemma": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]),
}


def byte_fallback_backend(style: str = "llama") -> tokenizers.Tokenizer:
    """Byte-fallback BPE without merges; `style` is one of `FALLBACK_DECODERS`."""
    vocab = {word: index for index, word in enumerate(BYTE_WORDS)}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    made.decoder = FALLBACK_DECODERS[style]
    made.add_special_tokens(BYTE_WORDS[:3])
    return made


def fallback_ids(data: bytes) -> list[int]:
    """One byte token per byte."""
    return [BYTE_WORDS.index(f"<0x{byte:02X}>") for byte in data]
