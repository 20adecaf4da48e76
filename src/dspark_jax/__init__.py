"""DSpark speculative decoding for JAX.

`load` opens a (target, draft) pair as a `Pipeline`; its results are `GenerationResult`s, its errors `DSparkError`s. The
names are resolved on first use, so that importing one room (`dspark_jax.architectures...`) does not import the
pipelines above it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark_jax.pipelines.api import (
        DSparkError,
        Generation,
        GenerationResult,
        Grammar,
        Pipeline,
        PromptFormat,
        load,
    )

    __version__: str

__all__ = [
    "DSparkError",
    "Generation",
    "GenerationResult",
    "Grammar",
    "Pipeline",
    "PromptFormat",
    "__version__",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        return importlib.import_module("dspark_jax.speculators_common.version").version()
    return getattr(importlib.import_module("dspark_jax.pipelines.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
