"""The data of an opened checkpoint, the same for every file format."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark_jax.speculators_common.files.gguf_header import GGUFHeader
from dspark_jax.speculators_common.formats.recipes import TensorSource


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model on disk. Its config and its headers were read, its tensors were not."""

    path: Path  # the directory, or the .gguf file
    config: Mapping[str, Any]  # the raw config.json; for GGUF an equivalent one
    config_file: str  # the file that errors about `config` name
    generation_config: Mapping[str, Any]  # empty if there is none
    tensors: Mapping[str, TensorSource] = dataclasses.field(repr=False)  # by stored name; for GGUF Hugging Face names
    tensor_files: Mapping[str, str] = dataclasses.field(repr=False)  # the file of each tensor
    architecture: str
    bytes_on_disk: int  # of the tensor files
    gguf_header: GGUFHeader | None = dataclasses.field(default=None, repr=False)  # kept because parsing takes long
