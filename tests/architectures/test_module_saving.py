"""A module that is saved by its recipes gives the file that it was loaded from, bit for bit, in the same dtypes."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from dspark_jax.architectures import registry
from dspark_jax.architectures.dspark_draft.model import DSparkSpeculatorsDraft
from dspark_jax.architectures.module_saving import module_tensors, save_draft
from dspark_jax.architectures.parameters import flat_parameters, parameter_axes
from dspark_jax.architectures.registry import retrieve
from dspark_jax.pipelines.checkpoints.checkpoint import open_checkpoint
from dspark_jax.pipelines.checkpoints.loading import (
    LoadedDraft,
    LoadedTarget,
    load_draft,
    load_target,
    parse_checkpoint,
)
from dspark_jax.speculators_common.errors import CheckpointError, DSparkError
from dspark_jax.speculators_common.formats.draft_config import DraftOverrides
from dspark_jax.speculators_common.formats.recipes import AXIS_NAMES, Recipe, constant, copied, transposed
from tests.support import tiny_families

DATA = Path(__file__).parents[1] / "data"
TARGETS = [folder.name for folder in sorted((DATA / "E_targets").iterdir())]
RECORDED = [
    str(folder.relative_to(DATA))
    for oracle in ("A_deepspec_qwen3", "B_deepspec_gemma4", "C_speculators", "H_compact")
    for folder in sorted((DATA / oracle).iterdir())
    if folder.name != "verifier"
]
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}

pytestmark = pytest.mark.usefixtures("quick_compilation")


def assert_same_tensors(stored: dict[str, np.ndarray], written: dict[str, np.ndarray]) -> None:
    assert stored.keys() == written.keys()
    for name, tensor in stored.items():
        assert (tensor.dtype, tensor.shape) == (written[name].dtype, written[name].shape), name
        assert tensor.tobytes() == written[name].tobytes(), name


def stored_in(dtype: str, source: Path, folder: Path) -> Path:
    """A copy of a checkpoint with its floating-point tensors in `dtype`."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("expected*"))
    tensors = load_file(source / "model.safetensors")
    changed = {name: t.astype(DTYPES[dtype]) if "float" in t.dtype.name else t for name, t in tensors.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def recipes_of(loaded: LoadedTarget | LoadedDraft) -> dict[str, Recipe]:
    entry = retrieve(loaded.checkpoint.architecture)
    return dict(entry.recipes(loaded.config, loaded.checkpoint.tensors.keys()))


def dtypes_of(tensors: Any) -> dict[str, str]:
    return {name: tensor.dtype for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> LoadedTarget:
    return load_target(tiny_families.tiny_target().write(tmp_path_factory.mktemp("tiny")), jnp.float32)


@pytest.fixture(scope="module")
def recorded_target() -> LoadedTarget:
    """A target with the sizes that all recorded drafts state."""
    return load_target(DATA / "C_speculators" / "verifier", jnp.float32)


@pytest.mark.parametrize(
    ("on_disk", "loaded_as"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
)
@pytest.mark.parametrize("name", TARGETS)
def test_a_loaded_target_is_written_bit_for_bit(name: str, on_disk: str, loaded_as: str, tmp_path: Path) -> None:
    """All tensors are equal except those that are ignored: other towers, and stored copies."""
    folder = stored_in(on_disk, DATA / "E_targets" / name, tmp_path / "target")
    target = load_target(folder, DTYPES[loaded_as])
    recipes = recipes_of(target)
    used = {tensor for recipe in recipes.values() for tensor in recipe.tensors}
    stored = {name: t for name, t in load_file(folder / "model.safetensors").items() if name in used}
    assert_same_tensors(stored, module_tensors(target.module, recipes, dtypes_of(target.checkpoint.tensors)))


@pytest.mark.parametrize("name", TARGETS)
def test_every_parameter_of_a_target_has_named_axes(name: str) -> None:
    target = load_target(DATA / "E_targets" / name, jnp.float32)
    assert_named_axes(target.module, recipes_of(target))


def assert_named_axes(module: nnx.Module, recipes: dict[str, Recipe]) -> None:
    """Check that each axis has a known name or none, and that axes of one name have the same size.

    A fused axis is a multiple of that size.
    """
    axes, parameters = parameter_axes(module, recipes), flat_parameters(module)
    assert axes.keys() == parameters.keys()
    for path, names in axes.items():
        shape = parameters[path][1].get_value().shape
        assert len(names) == len(shape), path
        assert {name for name in names if name is not None} <= AXIS_NAMES, path
        for name, size in zip(names, shape, strict=True):
            if name == "hidden":
                assert size == module.config.hidden_size, path  # type: ignore[attr-defined]
            if name == "vocab":
                assert size == module.config.vocab_size, path  # type: ignore[attr-defined]


def saved_again(draft: LoadedDraft, folder: Path, **options: Any) -> dict[str, np.ndarray]:
    assert save_draft(draft.module, folder, stored=draft.checkpoint.tensors, **options) == folder
    return load_file(folder / "model.safetensors")


def assert_round_trip(source: Path, target: LoadedTarget, dtype: str, tmp_path: Path) -> None:
    """Load, save and load again, and check that files, configs and modules are equal."""
    draft = load_draft(source, target, DTYPES[dtype])
    written = saved_again(draft, tmp_path / "again")
    stored = load_file(source / "model.safetensors")
    unused = retrieve(draft.checkpoint.architecture).ignored(draft.config)
    assert_same_tensors({name: tensor for name, tensor in stored.items() if name not in unused}, written)
    again = load_draft(tmp_path / "again", target, DTYPES[dtype])
    assert (again.config, again.config.family, again.tables) == (draft.config, draft.config.family, draft.tables)
    ours, theirs = flat_parameters(draft.module), flat_parameters(again.module)
    assert ours.keys() == theirs.keys()
    for path, (_, variable) in ours.items():
        assert np.asarray(variable.get_value()).tobytes() == np.asarray(theirs[path][1].get_value()).tobytes(), path
    assert_named_axes(draft.module, dict(retrieve(draft.config.architecture).recipes(draft.config, _with_head(draft))))


def _with_head(draft: LoadedDraft) -> set[str]:
    """The names of the file's tensors, and of a head that consists of rows of the target's head."""
    return {*draft.checkpoint.tensors, *({"lm_head.weight"} if draft.tables.lm_head == "target_rows" else ())}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_draft_is_written_bit_for_bit(name: str, recorded_target: LoadedTarget, tmp_path: Path) -> None:
    assert_round_trip(DATA / name, recorded_target, "float32", tmp_path)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", tiny_families.FAMILIES)
def test_a_draft_of_every_family_is_written_bit_for_bit(
    family: str, dtype: str, tiny_target: LoadedTarget, tmp_path: Path
) -> None:
    """The files are bfloat16. They are loaded into bfloat16 and float32 modules."""
    source = stored_in("bfloat16", tiny_families.FAMILIES[family](tmp_path / "float32"), tmp_path / "source")
    assert_round_trip(source, tiny_target, dtype, tmp_path)


def test_without_a_file_all_tensors_are_written_as_the_module_has_them(
    tiny_target: LoadedTarget, tmp_path: Path
) -> None:
    source = tiny_families.FAMILIES["speculators dspark, gated, pruned"](tmp_path / "source")
    draft = load_draft(source, tiny_target, jnp.bfloat16)
    save_draft(draft.module, tmp_path / "own")
    own = load_file(tmp_path / "own" / "model.safetensors")
    assert own.keys() == {*load_file(source / "model.safetensors"), "t2d", "confidence_head.proj.bias"}
    assert own["fc.weight"].dtype == own["embed_tokens.weight"].dtype == jnp.bfloat16
    assert own["norm.weight"].dtype == own["confidence_head.proj.weight"].dtype == np.float32
    assert (own["d2t"].dtype, own["t2d"].dtype) == (np.int64, np.bool_)
    assert np.flatnonzero(own["t2d"]).tolist() == [1, 3, 5, 7, 9, 11]
    save_draft(draft.module, tmp_path / "narrow", dtype=jnp.bfloat16)
    narrow = load_file(tmp_path / "narrow" / "model.safetensors")
    assert {tensor.dtype for name, tensor in narrow.items() if name not in ("d2t", "t2d")} == {np.dtype(jnp.bfloat16)}


def test_padding_rows_that_were_cut_off_come_back_as_zeros() -> None:
    recipe = transposed("head", (5, 2), rows=3, axes=("hidden", "draft_vocab"))
    stored = np.arange(1, 11, dtype=np.float32).reshape(5, 2)
    (written,) = recipe.disassemble(recipe.assemble([stored]))
    np.testing.assert_array_equal(written, np.concatenate([stored[:3], np.zeros((2, 2), np.float32)]))


class _Two(nnx.Module):
    def __init__(self) -> None:
        self.table, self.head = nnx.Param(jnp.ones((3, 2))), nnx.Param(jnp.ones((2, 3)))


def test_two_parameters_of_one_tensor_must_agree() -> None:
    module = _Two()
    recipes = {
        "table": copied("weight", (3, 2), axes=("vocab", "hidden")),
        "head": transposed("weight", (3, 2), axes=("hidden", "vocab")),
    }
    assert module_tensors(module, recipes).keys() == {"weight"}
    module.head[...] = 2 * module.head[...]
    with pytest.raises(DSparkError, match=r"parameter head: found other values, allowed those of tensor weight"):
        module_tensors(module, recipes)


def test_a_parameter_that_the_file_has_no_place_for_is_written_only_unchanged() -> None:
    module = _Two()
    recipes = {
        "table": transposed("weight", (2, 3), axes=("vocab", "hidden")),
        "head": constant(np.ones((2, 3), np.float32), axes=("hidden", "vocab")),
    }
    assert module_tensors(module, recipes).keys() == {"weight"}
    module.head[...] = jnp.zeros((2, 3))
    with pytest.raises(DSparkError, match=r"parameter head: found .*the file has no tensor for it"):
        module_tensors(module, recipes)
    with pytest.raises(DSparkError, match="parameters without a weight recipe: head"):
        module_tensors(module, {"table": recipes["table"]})


INEXPRESSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "deepspec qwen3": (
        {"partial_rotary_factor": 0.5},
        "cannot be written in the DeepSpec format: partial_rotary_factor",
    ),
    "deepspec dflash": ({"sample_from_anchor": False}, "cannot be written in the DeepSpec format: sample_from_anchor"),
    "z-lab dflash": (
        {"sample_from_anchor": True},
        "cannot be written in the z-lab DFlash format: sample_from_anchor: found True, allowed false: a fill-in block",
    ),
    "speculators dflash, pruned": (
        {"partial_rotary_factor": 0.5},
        "cannot be written in the speculators format: partial_rotary_factor: found 0.5",
    ),
}


@pytest.mark.parametrize("family", INEXPRESSIBLE)
def test_a_draft_that_its_format_has_no_words_for_is_refused_and_nothing_is_left(
    family: str, tiny_target: LoadedTarget, tmp_path: Path
) -> None:
    """No field of the format can express the user's override."""
    stated, said = INEXPRESSIBLE[family]
    source = tiny_families.FAMILIES[family](tmp_path / "source")
    draft = load_draft(source, tiny_target, jnp.float32, DraftOverrides(**stated))
    with pytest.raises(CheckpointError) as caught:
        saved_again(draft, tmp_path / "out")
    assert str(caught.value).startswith(f"{source}/config.json: {said}")
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_a_family_without_a_writer_is_refused(
    tiny_target: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = load_draft(tiny_families.FAMILIES["deepspec qwen3"](tmp_path / "source"), tiny_target, jnp.float32)
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    registry.register(dataclasses.replace(retrieve("Qwen3DSparkModel"), write_config=None), override=True)
    with pytest.raises(DSparkError, match="Qwen3DSparkModel: drafts of the family deepspec_qwen3 cannot be written"):
        saved_again(draft, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_a_save_goes_to_a_new_directory_or_to_that_of_a_draft(tiny_target: LoadedTarget, tmp_path: Path) -> None:
    draft = load_draft(tiny_families.FAMILIES["deepspec qwen3"](tmp_path / "source"), tiny_target, jnp.float32)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DSparkError, match=r"file: is a file, allowed a directory"):
        saved_again(draft, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("of a draft before")
    saved_again(draft, tmp_path / "full")
    saved_again(draft, tmp_path / "deeper" / "new")
    for folder in (tmp_path / "full", tmp_path / "deeper" / "new"):
        assert sorted(entry.name for entry in folder.iterdir()) == ["config.json", "model.safetensors"]
        assert load_draft(folder, tiny_target, jnp.float32).config == draft.config


def test_a_draft_made_in_a_program_is_saved_if_a_file_can_say_what_it_is(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "intermediate_size": 12,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "sliding_window": 6,
        "layer_causal": [False],
        "vocab_size": 11,
        "draft_vocab_size": 11,
        "markov_rank": 2,
        "block_size": 4,
        "sample_from_anchor": True,
        "mask_token_id": 10,
        "num_context_features": 2,
    }
    made = DSparkSpeculatorsDraft(**sizes, max_seq_len=64, rngs=nnx.Rngs(0))
    save_draft(made, tmp_path / "saved")
    entry, config = parse_checkpoint(open_checkpoint(tmp_path / "saved"), "draft")
    assert (entry.name, config) == ("DSparkDraftModel", made.config)
    with pytest.raises(CheckpointError, match="max_position_embeddings: found None, allowed an integer >= 1"):
        save_draft(DSparkSpeculatorsDraft(**sizes, max_seq_len=None, rngs=nnx.Rngs(0)), tmp_path / "endless")
    assert not (tmp_path / "endless").exists()


def test_a_failed_save_leaves_the_former_draft(tiny_target: LoadedTarget, tmp_path: Path) -> None:
    draft = load_draft(tiny_families.FAMILIES["deepspec qwen3"](tmp_path / "source"), tiny_target, jnp.float32)
    saved_again(draft, tmp_path / "out")
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(DSparkError, match=r"found notes.txt in it"):
        saved_again(draft, tmp_path / "out")
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == {**before, "notes.txt": b"mine"}
