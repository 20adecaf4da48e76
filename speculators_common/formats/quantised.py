"""Refusal of checkpoints with quantised weights, before anything else is checked.

Most writers state the quantisation in `config.json`. ModelOpt and old versions of AutoGPTQ and AutoAWQ write another
file beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dspark_jax.speculators_common.errors import CheckpointError, field_error
from dspark_jax.speculators_common.files.json_file import read_json_object

_FIELDS = ("quantization_config", "compression_config", "quantization", "load_in_4bit", "load_in_8bit")
_METHODS = ("quant_method", "quant_algo", "format")  # fields that name the method, one per writer
_OF_ANOTHER_MODEL = ("verifier", "speculators_config")  # sections that describe a draft's target
_SUPPORTED = "quantised weights are not supported, only float32, bfloat16 and float16 ones"
_ALLOWED = f"no such field: {_SUPPORTED}"
_MODELOPT_FILE = "hf_quant_config.json"
_MODELOPT_METHODS = ("quant_algo", "kv_cache_quant_algo")
# File name -> method. The method is known from the writer; few of these files state it.
_OTHER_FILES = {"quantize_config.json": "a GPTQ", "quant_config.json": "an AWQ"}


def refuse_quantised(raw: Mapping[str, Any], file: Path | str) -> None:
    """Refuse a config that states a quantisation method.

    `raw` is the content of `file`. The method may be stated at the top level or in a section, such as `text_config`,
    except in one that describes the target of a draft. Raises a `CheckpointError` that names it.
    """
    for prefix, section in _sections(raw):
        for name in _FIELDS:
            stated = section.get(name)
            if stated is None or stated is False or stated == {}:
                continue
            method = next((key for key in _METHODS if isinstance(stated, Mapping) and stated.get(key)), None)
            if method is None or not isinstance(stated, Mapping):
                raise field_error(file, f"{prefix}{name}", stated, _ALLOWED)
            raise field_error(file, f"{prefix}{name}.{method}", stated[method], _ALLOWED)


def _sections(raw: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(dotted prefix, section) of `raw` and of every section in it that describes the same model."""
    yield prefix, raw
    for name, below in raw.items():
        if isinstance(below, Mapping) and name not in (*_FIELDS, *_OF_ANOTHER_MODEL):
            yield from _sections(below, f"{prefix}{name}.")


def refuse_quantised_directory(directory: Path) -> None:
    """Refuse a checkpoint `directory` in which another file than `config.json` states a quantisation method.

    Raises a `CheckpointError` that names the file and the method.
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
    """Refuse the file of ModelOpt, unless both its methods (weights; keys and values) are null: not quantised."""
    raw = read_json_object(file)
    section = raw.get("quantization")
    if not isinstance(section, Mapping) or not any(name in section for name in _MODELOPT_METHODS):
        refuse_quantised(raw, file)
        raise field_error(file, "quantization", section, "a JSON object that states quant_algo")
    for name in _MODELOPT_METHODS:
        if section.get(name) is not None:
            raise field_error(file, f"quantization.{name}", section[name], _ALLOWED)
