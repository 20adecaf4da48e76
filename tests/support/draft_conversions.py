"""Drafts to convert, `dspark convert` in-process, and what is looked at afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.pipelines.checkpoints.checkpoint import open_checkpoint
from dspark_jax.pipelines.checkpoints.loading import parse_checkpoint
from dspark_jax.speculators_common.formats.draft_config import DraftConfig
from tests.support import tiny_families
from tests.support.text_pair import Finished, copied, dspark
from tests.support.tiny_checkpoints import TinyCheckpoint, random_tensors

Capture = pytest.CaptureFixture[str]


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """Every stored tensor."""
    return load_file(folder / "model.safetensors")


def config_of(folder: Path) -> DraftConfig:
    """The draft that the files describe."""
    return parse_checkpoint(open_checkpoint(folder), "draft")[1]


def json_of(folder: Path) -> dict[str, Any]:
    """The raw `config.json`."""
    return json.loads((folder / "config.json").read_text())


def assert_same_bits(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    """Equal names, dtypes and bytes."""
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        assert one[name].tobytes() == other[name].tobytes(), name


def changed_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> Path:
    """The directory, after `change` has been made to its tensors."""
    tensors = tensors_of(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def converted(capsys: Capture, *arguments: object) -> Finished:
    """Run a conversion that has to succeed."""
    finished = dspark(capsys, "convert", *arguments)
    assert finished.status == 0, finished.err
    assert finished.out == ""
    return finished


def refused(capsys: Capture, folder: Path, *arguments: object) -> str:
    """The one line that a refused conversion prints; `folder` is where nothing may be left."""
    before = sorted(folder.rglob("*"))
    finished = dspark(capsys, "convert", *arguments)
    assert finished.status == 2
    assert finished.out == ""
    assert finished.err.count("\n") == 1
    assert finished.err.startswith("dspark: error: ")
    assert sorted(folder.rglob("*")) == before
    return finished.err.strip().removeprefix("dspark: error: ")


def full_speculators_draft(data_dir: Path, folder: Path, **fields: Any) -> Path:
    """A draft that stores no tables, as the newer layout does, of full layers over the whole vocabulary;
    `C_speculators/verifier` is its target.
    """
    draft = copied(
        data_dir / "C_speculators" / "full_anchor_slidingnoncausal_vanilla",
        folder,
        sliding_window_non_causal=False,
        **fields,
    )
    raw = json_of(draft)
    raw["transformer_layer_config"] |= {
        "layer_types": ["full_attention"] * 2,
        "sliding_window": None,
        "use_sliding_window": False,
    }
    (draft / "config.json").write_text(json.dumps(raw))
    assert not {"embed_tokens.weight", "lm_head.weight"} & tensors_of(draft).keys()
    return draft


def zlab_draft(folder: Path, **fields: Any) -> Path:
    """A z-lab DFlash draft for the target of `tiny_families`."""
    raw = tiny_families.zlab_config(**fields)
    return TinyCheckpoint(config=raw, tensors=random_tensors(raw, 3)).write(folder)
