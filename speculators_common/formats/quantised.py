"""Checkpoints whose weights are quantised: refused by the name of the method, before anything else is looked at.

Most writers state it in `config.json`. ModelOpt, old AutoGPTQ and old AutoAWQ write a file of their own beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark_jax.speculators_common.errors import CheckpointError, field_error
from dspark_jax.speculators_common.files.json_file import read_json_object

_SECTIONS = ("quantization_config", "compression_config", "quantization")
_METHODS = ("quant_method", "quant_algo", "format")  # what names the method, in the words of the writers
_NESTED = ("text_config", "transformer_layer_config")
_SUPPORTED = "quantised weights are not supported, only float32, bfloat16 and float16 ones"
_ALLOWED = f"no such field: {_SUPPORTED}"
_MODELOPT_FILE = "hf_quant_config.json"
_MODELOPT_METHODS = ("quant_algo", "kv_cache_quant_algo")
_OTHER_FILES = {"quantize_config.json": "a GPTQ", "quant_config.json": "an AWQ"}  # by the writer, as few files state it


def refuse_quantised(raw: Mapping[str, Any], file: Path | str) -> None:
    """Raise a `CheckpointError` that names the quantisation method, if the config `raw` of `file` states one, at the
    top level or in its text or layer part.
    """
    for prefix, place in (("", raw), *((f"{name}.", raw.get(name)) for name in _NESTED)):
        for section in _SECTIONS:
            stated = place.get(section) if isinstance(place, Mapping) else None
            if stated is None or stated == {}:
                continue
            method = next((name for name in _METHODS if isinstance(stated, Mapping) and stated.get(name)), None)
            if method is None or not isinstance(stated, Mapping):
                raise field_error(file, f"{prefix}{section}", stated, _ALLOWED)
            raise field_error(file, f"{prefix}{section}.{method}", stated[method], _ALLOWED)


def refuse_quantised_directory(directory: Path) -> None:
    """Raise a `CheckpointError` that names the file and the quantisation method, if a file beside the `config.json` in
    `directory` states one.
    """
    if (directory / _MODELOPT_FILE).is_file():
        _refuse_modelopt(directory / _MODELOPT_FILE)
    for name, method in _OTHER_FILES.items():
        file = directory / name
        stated = read_json_object(file) if file.is_file() else {}
        if stated.get("quant_method"):
            raise field_error(file, "quant_method", stated["quant_method"], _ALLOWED)
        if stated:
            raise CheckpointError(
                f"found the settings of {method} export, allowed no such file: {_SUPPORTED}", file=file
            )


def _refuse_modelopt(file: Path) -> None:
    """A method of null says that the weights, or the keys and values, are as they were."""
    raw = read_json_object(file)
    section = raw.get("quantization")
    if not isinstance(section, Mapping) or not any(name in section for name in _MODELOPT_METHODS):
        refuse_quantised(raw, file)
        raise field_error(file, "quantization", section, "a JSON object that states quant_algo")
    for name in _MODELOPT_METHODS:
        if section.get(name) is not None:
            raise field_error(file, f"quantization.{name}", section[name], _ALLOWED)
