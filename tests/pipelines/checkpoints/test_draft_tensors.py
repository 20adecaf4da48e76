"""The tensors of a draft's file: names with and without a prefix, and id tables that leave no parameter."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from dspark_jax.architectures import dspark_compact
from dspark_jax.pipelines.checkpoints.conversion import convert_draft
from dspark_jax.pipelines.checkpoints.description import describe
from dspark_jax.pipelines.checkpoints.loading import LoadedTarget, load_draft, load_target, prepare_draft
from dspark_jax.speculators_common.errors import CheckpointError
from tests.support.tiny_checkpoints import TinyCheckpoint, random_tensors
from tests.support.tiny_families import FAMILIES, VOCAB, speculators_dflash_config, tiny_target

_WEIGHTS = "model.safetensors"


@functools.cache
def _target() -> LoadedTarget:
    with tempfile.TemporaryDirectory() as folder:
        return load_target(tiny_target().write(Path(folder)), "float32")


def _renamed(folder: Path, rename: Any) -> Path:
    tensors = load_file(folder / _WEIGHTS)
    save_file({rename(name): tensor for name, tensor in tensors.items()}, folder / _WEIGHTS)
    return folder


def _assert_equal_weights(one: nnx.Module, other: nnx.Module) -> None:
    assert nnx.graphdef(one) == nnx.graphdef(other)
    for mine, theirs in zip(jax.tree.leaves(nnx.state(one)), jax.tree.leaves(nnx.state(other)), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("family", ["deepspec gemma4", "z-lab dflash", "speculators dflash, pruned"])
def test_a_prefix_on_all_names_is_no_part_of_them(family: str, tmp_path: Path) -> None:
    folder = FAMILIES[family](tmp_path / "draft")
    plain, described = load_draft(folder, _target(), "float32"), describe(folder)
    _renamed(folder, lambda name: f"model.{name}")
    prefixed = load_draft(folder, _target(), "float32")
    assert (prefixed.config, prefixed.tables) == (plain.config, plain.tables)
    _assert_equal_weights(prefixed.module, plain.module)
    assert describe(folder).num_parameters == described.num_parameters


def test_a_prefix_is_no_part_of_the_names_of_a_compact_draft(tmp_path: Path, data_dir: Path) -> None:
    folder = Path(shutil.copytree(data_dir / "H_compact" / "markov", tmp_path / "draft"))
    plain = dspark_compact.load(folder)
    _assert_equal_weights(dspark_compact.load(_renamed(folder, lambda name: f"model.{name}")), plain)


@pytest.mark.usefixtures("quick_compilation")
def test_a_prefix_is_not_carried_into_a_converted_draft(tmp_path: Path) -> None:
    folder = FAMILIES["deepspec dflash"](tmp_path / "draft")
    stored = load_file(folder / _WEIGHTS)
    convert_draft(_renamed(folder, lambda name: f"model.{name}"), tmp_path / "converted", "speculators")
    converted = load_file(tmp_path / "converted" / _WEIGHTS)
    assert {"fc.weight", "norm.weight"} < converted.keys() <= stored.keys()
    assert all(np.array_equal(tensor, stored[name]) for name, tensor in converted.items())


def test_a_prefix_on_some_names_is_refused_by_name(tmp_path: Path) -> None:
    folder = _renamed(
        FAMILIES["deepspec gemma4"](tmp_path / "draft"),
        lambda name: f"model.{name}" if name.startswith("layers.1.") else name,
    )
    for use in (lambda: load_draft(folder, _target(), "float32"), lambda: describe(folder)):
        with pytest.raises(
            CheckpointError,
            match=r"tensor layers\.1\.(\w+)\.weight: missing.*tensor model\.layers\.1\.\1\.weight: unexpected",
        ):
            use()


def test_a_vocabulary_map_of_a_whole_vocabulary_must_be_the_identity(tmp_path: Path) -> None:
    config = speculators_dflash_config()
    tensors = random_tensors(config, 2, "embed_tokens.weight", "lm_head.weight")
    offsets = np.zeros(VOCAB, np.int64)
    checkpoint = TinyCheckpoint(config=config, tensors={**tensors, "d2t": offsets, "t2d": np.ones(VOCAB, bool)})
    assert load_draft(checkpoint.write(tmp_path / "identity"), _target(), "float32").module.draft_to_target is None
    offsets[-1] = -1
    folder = checkpoint.write(tmp_path / "other")
    assert _the_error_of_both(folder) == (
        f"{folder}: tensor d2t: found 'offset -1 at draft id 12', allowed only offset 0 (identity), as "
        f"draft_vocab_size {VOCAB} is not smaller than vocab_size {VOCAB}"
    )


def _changed_map(folder: Path, **changes: np.ndarray | None) -> Path:
    tensors: dict[str, Any] = {**load_file(folder / _WEIGHTS), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / _WEIGHTS)
    return folder


def _the_error_of_both(folder: Path) -> str:
    """The message with which the description and the preparation of a draft refuse it alike."""
    messages = set()
    for use in (lambda: describe(folder), lambda: prepare_draft(folder, _target(), "float32")):
        with pytest.raises(CheckpointError) as caught:
            use()
        messages.add(str(caught.value))
    [message] = messages
    return message


def test_a_faulty_vocabulary_map_is_found_by_a_description_and_before_weights_are_read(tmp_path: Path) -> None:
    folder = FAMILIES["speculators dflash, pruned"](tmp_path / "draft")
    offsets = load_file(folder / _WEIGHTS)["d2t"]
    describe(folder)
    beyond, falling = offsets.copy(), offsets.copy()
    beyond[-1] = VOCAB
    falling[1] = offsets[0] - 1
    last = len(offsets) - 1
    assert _the_error_of_both(_changed_map(folder, d2t=beyond)) == (
        f"{folder}: tensor d2t: found 'draft id {last} with offset {VOCAB}, target id {last + VOCAB}', allowed target "
        f"ids (draft id + offset) in [0, {VOCAB})"
    )
    assert "that increase strictly" in _the_error_of_both(_changed_map(folder, d2t=falling))
    marks = np.zeros(VOCAB, bool)
    assert "tensor t2d: found" in _the_error_of_both(_changed_map(folder, d2t=offsets, t2d=marks))
    assert f"tensor t2d: found '0 true, none for draft id 0', allowed {last + 1} true" in _the_error_of_both(
        _changed_map(folder, d2t=None)
    )
    assert _the_error_of_both(_changed_map(folder, t2d=None)).startswith(f"{folder}: tensor d2t: missing")
    real = offsets.astype(np.float32)
    assert "tensor d2t: found 'float32', allowed a signed integer" in _the_error_of_both(_changed_map(folder, d2t=real))
