"""Checkpoints whose weights are quantised: refused by the name of the method, before anything else is looked at."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark_jax.speculators_common.errors import field_error

_SECTIONS = ("quantization_config", "compression_config", "quantization")
_METHODS = ("quant_method", "quant_algo")  # what names the method, in the words of the writers
_NESTED = ("text_config", "transformer_layer_config")
_ALLOWED = "no such field: quantised weights are not supported, only float32, bfloat16 and float16 ones"


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
