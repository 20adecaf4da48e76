"""Compact drafts are made, saved and loaded bit for bit, and files that do not fit are refused by name."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from dspark_jax.architectures import dspark_compact
from dspark_jax.architectures.dspark_compact import arch
from dspark_jax.architectures.dspark_compact.weights import compact_recipes
from dspark_jax.architectures.module_saving import module_tensors
from dspark_jax.pipelines.checkpoints.checkpoint import open_checkpoint
from dspark_jax.pipelines.checkpoints.loading import LoadedTarget, load_draft, load_target
from dspark_jax.speculators_common.errors import CheckpointError, DSparkError, PairError
from dspark_jax.speculators_common.formats.compact.format import CompactDims, CompactSettings
from dspark_jax.speculators_common.formats.draft_config import FINAL, SlotThresholds
from tests.support.recorded_variants import COMPACT_VARIANTS

DATA = Path(__file__).parents[2] / "data"
DIMS = CompactDims(hidden_size=12, vocab_size=17, rms_norm_eps=1e-5, num_layers=4)
SETTINGS = CompactSettings(
    block_size=3, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, markov_rank=4, tap_layers=(1, 4)
)
TARGET_ID = "tiny@12x17"

pytestmark = pytest.mark.usefixtures("quick_compilation")


def fresh(seed: int = 0, *, dtype: Any = jnp.float32, **settings: Any) -> dspark_compact.CompactDraft:
    return dspark_compact.init_from_dims(DIMS, dataclasses.replace(SETTINGS, **settings), TARGET_ID, seed, dtype=dtype)


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    """A target with the sizes of the recorded drafts: hidden size 64, 199 token ids, six layers."""
    return load_target(DATA / "D_loop" / "target", jnp.float32)


def copy(variant: str, tmp_path: Path) -> Path:
    return Path(
        shutil.copytree(DATA / "H_compact" / variant, tmp_path / variant, ignore=shutil.ignore_patterns("expected*"))
    )


def leaves(draft: nnx.Module) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(draft))]


@pytest.mark.parametrize("variant", COMPACT_VARIANTS)
def test_what_is_saved_is_what_was_loaded(variant: str, tmp_path: Path) -> None:
    source = DATA / "H_compact" / variant
    draft = dspark_compact.load(source)
    dspark_compact.save(draft, tmp_path / "copy")
    stored, written = load_file(source / "model.safetensors"), load_file(tmp_path / "copy" / "model.safetensors")
    assert stored.keys() == written.keys()
    for name, tensor in stored.items():
        assert tensor.dtype == written[name].dtype == np.float32
        assert tensor.tobytes() == written[name].tobytes(), name
    raw, rewritten = (json.loads((folder / "dspark.json").read_text()) for folder in (source, tmp_path / "copy"))
    raw["config"].setdefault("seqHead", "markov")
    assert rewritten == raw
    assert json.loads((tmp_path / "copy" / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("head", ["markov", "rnn"])
def test_a_draft_loads_back_bit_for_bit(head: str, dtype: Any, tmp_path: Path) -> None:
    draft = fresh(
        seed=5, dtype=dtype, sequence_head=head, thresholds=SlotThresholds(values=(0.0, 0.25, 1.0), target=0.5)
    )
    nnx.update(
        draft,
        jax.tree.map(
            lambda leaf: leaf + jnp.asarray(0.7, leaf.dtype) if leaf.dtype == dtype else leaf, nnx.state(draft)
        ),
    )
    assert dspark_compact.save(draft, tmp_path / "draft") == tmp_path / "draft"
    again = dspark_compact.load(tmp_path / "draft", dims=DIMS, target_id=TARGET_ID, dtype=dtype)
    assert again.config == draft.config
    for ours, theirs in zip(leaves(draft), leaves(again), strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.tobytes() == theirs.tobytes()


def test_the_pipeline_loads_the_same_bits(target: LoadedTarget) -> None:
    folder = DATA / "H_compact" / "rnn"
    loaded = load_draft(folder, target, jnp.float32)
    assert (loaded.tables.embed_tokens, loaded.tables.lm_head) == ("target", "target")
    assert not loaded.module.has_own_embed_tokens
    assert not loaded.module.has_own_lm_head
    assert loaded.config.taps == (3, 5, FINAL)
    assert loaded.checkpoint.config_file == str(folder / "dspark.json")
    for ours, theirs in zip(leaves(loaded.module), leaves(dspark_compact.load(folder)), strict=True):
        assert ours.tobytes() == theirs.tobytes()


def test_a_directory_needs_no_label(tmp_path: Path) -> None:
    folder = copy("markov", tmp_path)
    (folder / "config.json").unlink()
    assert open_checkpoint(folder).architecture == "DsparkDrafter"
    assert dspark_compact.load(folder).config.family == "compact"


def test_saving_over_a_draft_replaces_it_and_a_failed_save_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = fresh(1), fresh(2)
    dspark_compact.save(first, tmp_path / "draft")
    before = {file.name: file.read_bytes() for file in (tmp_path / "draft").iterdir()}
    monkeypatch.setattr(arch, "to_compact", lambda config: {"broken": object()})
    with pytest.raises(TypeError, match="not JSON serializable"):
        dspark_compact.save(second, tmp_path / "draft")
    assert {file.name: file.read_bytes() for file in (tmp_path / "draft").iterdir()} == before
    monkeypatch.undo()
    dspark_compact.save(second, tmp_path / "draft")
    assert leaves(dspark_compact.load(tmp_path / "draft"))[0].tobytes() == leaves(second)[0].tobytes()
    (tmp_path / "draft" / "README.md").write_text("mine")
    with pytest.raises(DSparkError, match=r"found README.md in it"):
        dspark_compact.save(first, tmp_path / "draft")


def test_initial_values_are_those_of_the_format() -> None:
    tensors = tensors_of(fresh(sequence_head="rnn"))
    assert [name for name, tensor in tensors.items() if (tensor == 1).all()] == [
        "bb.0.attn_norm",
        "bb.0.ff_norm",
        "bb.1.attn_norm",
        "bb.1.ff_norm",
        "ctx_norm",
        "out_norm",
    ]
    assert [name for name, tensor in tensors.items() if not tensor.any()] == [
        "markov.w2",
        "conf.w",
        "conf.b",
        "rnn.bH",
        "rnn.wO",
    ]
    drawn = np.concatenate([tensor.ravel() for tensor in tensors.values() if tensor.any() and not (tensor == 1).all()])
    assert abs(drawn.std() - 0.02) < 0.002
    assert len({tensor.tobytes() for tensor in tensors.values() if tensor.shape == (8, 8)}) == 8


def test_drafts_of_one_seed_share_all_weights_but_those_of_the_head() -> None:
    markov, rnn, other = tensors_of(fresh(3)), tensors_of(fresh(3, sequence_head="rnn")), tensors_of(fresh(4))
    assert set(rnn) - set(markov) == {"rnn.wH", "rnn.bH", "rnn.wO"}
    for name, tensor in markov.items():
        assert tensor.tobytes() == rnn[name].tobytes()
    assert markov["W_c"].tobytes() != other["W_c"].tobytes()


def test_a_single_slot_has_no_mask_rows(tmp_path: Path) -> None:
    draft = fresh(block_size=1)
    assert tensors_of(draft)["mask_emb"].shape == (0, 8)
    dspark_compact.save(draft, tmp_path / "draft")
    assert dspark_compact.load(tmp_path / "draft").config.max_drafts == 1


def test_a_draft_for_a_live_target_takes_its_sizes(target: LoadedTarget) -> None:
    dims = dspark_compact.dims_of(target.module)
    assert dims == CompactDims(hidden_size=64, vocab_size=199, rms_norm_eps=target.config.rms_norm_eps, num_layers=6)
    draft = dspark_compact.init(target.module, dataclasses.replace(SETTINGS, tap_layers=(0, 5, 6)), "a@64x199", seed=1)
    assert draft.config.taps == (1, 6, FINAL)
    assert draft.config.num_target_layers == 6
    other = SimpleNamespace(config=SimpleNamespace(hidden_size=3, vocab_size=5, rms_norm_eps=1e-3, num_hidden_layers=7))
    assert dspark_compact.dims_of(other) == CompactDims(hidden_size=3, vocab_size=5, rms_norm_eps=1e-3, num_layers=7)


def test_a_draft_for_another_target_is_refused(target: LoadedTarget, tmp_path: Path) -> None:
    folder = DATA / "H_compact" / "markov"
    with pytest.raises(
        PairError,
        match=(
            "hidden size: the draft expects 64, the target has 12; vocabulary: the draft expects 199, the target has 17"
        ),
    ):
        dspark_compact.load(folder, dims=DIMS)
    with pytest.raises(PairError, match="target_id: found 'tiny-target@64x199', allowed 'other@64x199'"):
        dspark_compact.load(folder, target_id="other@64x199")
    dspark_compact.save(fresh(), tmp_path / "draft")
    with pytest.raises(PairError, match="hidden size: the draft expects 12, the target has 64"):
        load_draft(tmp_path / "draft", target, jnp.float32)


def _drop(tensors: dict[str, np.ndarray]) -> None:
    del tensors["bb.1.gate"]


def _add(tensors: dict[str, np.ndarray]) -> None:
    tensors["rnn.wH"] = np.zeros((8, 8), np.float32)


def _reshape(tensors: dict[str, np.ndarray]) -> None:
    tensors["tok_proj"] = np.ascontiguousarray(tensors["tok_proj"].T)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_drop, r"tensor bb.1.gate: missing, expected shape \[32, 64\]"),
        (_add, "tensor rnn.wH: unexpected"),
        (_reshape, r"tensor tok_proj: found shape \[32, 64\], expected \[64, 32\]"),
    ],
)
@pytest.mark.parametrize("by_pipeline", [True, False])
def test_other_tensors_than_the_description_s_are_refused_by_name(
    change: Any, expected: str, by_pipeline: bool, target: LoadedTarget, tmp_path: Path
) -> None:
    folder = copy("markov", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=expected):
        load_draft(folder, target, jnp.float32) if by_pipeline else dspark_compact.load(folder)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    folder = copy("markov", tmp_path)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-10])
    with pytest.raises(CheckpointError, match=r"model.safetensors: tensor .*\(the file is truncated\)"):
        dspark_compact.load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model.safetensors: cannot be read: No such file"):
        dspark_compact.load(folder)
    (folder / "dspark.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"dspark.json: found a JSON list, allowed an object"):
        dspark_compact.load(folder)
    (folder / "dspark.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"dspark.json: invalid JSON"):
        dspark_compact.load(folder)
    (folder / "dspark.json").write_text('{"kind": "dspark-drafter", "kind": "dspark-drafter"}')
    with pytest.raises(CheckpointError, match=r"dspark.json: invalid JSON: key 'kind' appears twice"):
        dspark_compact.load(folder)
    (folder / "dspark.json").unlink()
    with pytest.raises(CheckpointError, match=r"dspark.json: missing, allowed the file that describes a compact draft"):
        dspark_compact.load(folder)


def test_a_label_without_its_description_is_no_draft(target: LoadedTarget, tmp_path: Path) -> None:
    folder = copy("markov", tmp_path)
    (folder / "dspark.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json: dspark.json: missing beside it"):
        load_draft(folder, target, jnp.float32)


@pytest.mark.parametrize("by_pipeline", [True, False])
def test_a_label_that_contradicts_is_refused(by_pipeline: bool, target: LoadedTarget, tmp_path: Path) -> None:
    folder = copy("markov", tmp_path)
    label = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(label | {"target_hidden_size": 32}))
    with pytest.raises(
        CheckpointError, match=r"target_hidden_size: found 32, allowed 64, the dims.hiddenSize of dspark.json"
    ):
        load_draft(folder, target, jnp.float32) if by_pipeline else dspark_compact.load(folder)


def tensors_of(draft: dspark_compact.CompactDraft) -> dict[str, np.ndarray]:
    """The tensors of a draft as its file stores them, in float32."""
    recipes = compact_recipes(draft.config)
    return module_tensors(draft, recipes, {name: "float32" for recipe in recipes.values() for name in recipe.tensors})
