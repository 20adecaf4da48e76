"""What an opened checkpoint is, whatever format it came from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark_jax.pipelines.checkpoints.gguf_file import GGUFHeader
from dspark_jax.speculators_common.formats.recipes import TensorSource


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model on disk: its config parsed, its tensors known by header, their bytes not read yet.

    `path` is the directory, or the .gguf file. `config` is the raw Hugging Face config.json (for GGUF: an equivalent
    one); `config_file` is the file that errors about it should name. `tensors` are under their names in the file (for
    GGUF: the Hugging Face names), `tensor_files` says which file holds each one. `gguf_header` is that of a .gguf file,
    which holds the tokenizer too and takes long to parse.
    """

    path: Path
    config: Mapping[str, Any]
    config_file: str
    generation_config: Mapping[str, Any]
    tensors: Mapping[str, TensorSource] = dataclasses.field(repr=False)
    tensor_files: Mapping[str, str] = dataclasses.field(repr=False)
    architecture: str
    bytes_on_disk: int
    gguf_header: GGUFHeader | None = dataclasses.field(default=None, repr=False)
