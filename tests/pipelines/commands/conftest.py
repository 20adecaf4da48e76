"""Fixtures that run `dspark generate` on the recorded pair.

The package is imported inside the fixtures only: pytest may load this file before the annotation checks are installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import pytest

if TYPE_CHECKING:
    from tests.support.text_pair import Finished, RecordedPair


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A compilation cache for all commands of a module. Afterwards the settings of JAX are restored."""
    from jax.experimental.compilation_cache import compilation_cache

    names = ("jax_enable_compilation_cache", "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in (*names, "jax_persistent_cache_min_entry_size_bytes")}
    yield tmp_path_factory.mktemp("compiled")
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def pair(data_dir: Path) -> RecordedPair:
    from tests.support import text_pair

    return text_pair.recorded_pair(data_dir)


@pytest.fixture(scope="module")
def texts(pair: RecordedPair, tmp_path_factory: pytest.TempPathFactory) -> RecordedPair:
    from tests.support import text_pair

    return text_pair.with_text(pair, tmp_path_factory.mktemp("texts"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], cache: Path, pair: RecordedPair):
    """`dspark generate` on the recorded pair in float32; the arguments may name other models."""
    from tests.support.text_pair import dspark

    def generate(*arguments: object, target: Path = pair.target, draft: Path | None = pair.draft) -> Finished:
        models = ["--target", target, *([] if draft is None else ["--draft", draft])]
        return dspark(capsys, "generate", *models, "--dtype", "float32", "--compilation-cache", cache, *arguments)

    return generate
