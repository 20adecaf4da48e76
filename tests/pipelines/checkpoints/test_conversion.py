"""`dspark convert`: converts recorded drafts in both directions, and checks what they draft and where tensors and
fields come from.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dspark_jax.architectures.nn.attention.kv_cache import KVCache, KVPages
from dspark_jax.architectures.nn.attention.ragged_batch import PADDING_POSITION, RaggedBatch
from dspark_jax.pipelines.checkpoints.loading import load_draft, load_target
from tests.support import tiny_families
from tests.support.draft_conversions import (
    Capture,
    assert_same_bits,
    changed_tensors,
    config_of,
    converted,
    full_speculators_draft,
    json_of,
    refused,
    tensors_of,
    zlab_draft,
)
from tests.support.hub_server import cached
from tests.support.recorded_tensors import load_recorded
from tests.support.recorded_variants import DEEPSPEC_VARIANTS
from tests.support.text_pair import copied

TOLERANCE = 1e-4
PAGE_SIZE = 32

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize("variant", DEEPSPEC_VARIANTS)
def test_a_recorded_deepspec_draft_goes_there_and_back_bit_for_bit(
    variant: str, data_dir: Path, tmp_path: Path, capsys: Capture
) -> None:
    source = data_dir / "A_deepspec_qwen3" / variant
    there, back = tmp_path / "there", tmp_path / "back"
    finished = converted(capsys, source, there, "--to", "speculators", "--target-name", "org/target")
    stored = tensors_of(source)
    assert finished.err.splitlines()[-2] == f"wrote {there}: DSparkDraftModel, {len(stored)} tensors"
    assert finished.err.splitlines()[-1].endswith(
        f" parameters and the drafts of one block are those of {source}, bit for bit"
    )
    converted(capsys, there, back, "--to", "deepspec")
    assert config_of(source) == config_of(there) == config_of(back)
    assert_same_bits(stored, tensors_of(there))
    assert_same_bits(stored, tensors_of(back))
    assert json_of(there)["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert json_of(there)["dtype"] == json_of(back)["dtype"] == json_of(source)["dtype"]
    assert json_of(back)["target_layer_ids"] == json_of(source)["target_layer_ids"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["back", "there"]


def test_a_draft_may_be_named_by_its_hugging_face_id(
    data_dir: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = data_dir / "A_deepspec_qwen3" / "rank0_noconf"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cached(tmp_path / "cache", "org/draft", source)
    converted(capsys, "org/draft", tmp_path / "there", "--to", "speculators")
    assert_same_bits(tensors_of(source), tensors_of(tmp_path / "there"))


def drafted(folder: Path, expected: dict[str, np.ndarray], target: Path) -> dict[str, np.ndarray]:
    """The drafts of the draft in `folder` for the four recorded rounds, as rows with contexts of different length."""
    loaded_target = load_target(target, jnp.float32)
    draft = load_draft(folder, loaded_target, jnp.float32).module
    starts = np.asarray([int(expected[f"r{index}.start"][0]) for index in range(4)])
    taps = np.concatenate([expected[f"r{index}.context_taps"] for index in range(4)])
    places = np.arange(starts.max())
    positions = jnp.asarray(np.where(places < starts[:, None], places, PADDING_POSITION), jnp.int32)
    cache = KVCache(
        pages=KVPages.zeros(draft.kv_params(PAGE_SIZE), 4),
        page_table=jnp.arange(4, dtype=jnp.int32)[:, None],
        lengths=jnp.zeros((4,), jnp.int32),
    )
    context = draft.project_target_hidden(jnp.asarray(np.tile(taps, (4, 1))))
    cache = draft.materialize_kv(context, RaggedBatch.rectangle(jnp.zeros_like(positions), positions), cache)
    cache = dataclasses.replace(cache, lengths=jnp.asarray(starts, jnp.int32))
    anchors = jnp.asarray(expected["token_ids"][starts])
    hidden = draft.forward_block(draft.embed_block(anchors), cache)
    base_logits = draft.compute_logits(hidden)
    tokens = draft.sample_draft_tokens(base_logits, anchors, hidden=hidden)
    found = {
        "base_logits": base_logits,
        "sampled_tokens": tokens,
        "confidence_logits": draft.predict_confidence(hidden, anchors, tokens),
    }
    return {name: np.asarray(value) for name, value in found.items()}


def assert_recorded(folder: Path, expected: dict[str, np.ndarray], target: Path) -> None:
    found = drafted(folder, expected, target)
    for index in range(4):
        assert found["sampled_tokens"][index].tolist() == expected[f"r{index}.sampled_tokens"].tolist()
        for name in ("base_logits", "confidence_logits"):
            np.testing.assert_allclose(found[name][index], expected[f"r{index}.{name}"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("variant", ["rnn", "vanilla_plainconf"])
def test_converted_drafts_draft_what_the_reference_recorded(
    variant: str, data_dir: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Both directions. The way back starts from the newer speculators layout, without tables."""
    source, target = data_dir / "A_deepspec_qwen3" / variant, data_dir / "D_loop" / "target"
    expected = load_recorded(source)
    converted(capsys, source, tmp_path / "speculators", "--to", "speculators")
    assert_recorded(tmp_path / "speculators", expected, target)
    # A target with the same embedding and head that the recorded draft stores.
    same_tables = shutil.copytree(target, tmp_path / "target")
    tables = {name: tensors_of(source)[name] for name in ("embed_tokens.weight", "lm_head.weight")}
    changed_tensors(
        same_tables,
        lambda t: t.update(
            {"model.embed_tokens.weight": tables["embed_tokens.weight"], "lm_head.weight": tables["lm_head.weight"]}
        ),
    )
    changed_tensors(tmp_path / "speculators", lambda t: [t.pop(name) for name in tables])
    converted(capsys, tmp_path / "speculators", tmp_path / "deepspec", "--to", "deepspec", "--target", same_tables)
    assert_recorded(tmp_path / "deepspec", expected, target)
    assert_same_bits(tensors_of(source), tensors_of(tmp_path / "deepspec"))


def test_tables_and_depth_that_the_draft_lacks_are_the_targets(data_dir: Path, tmp_path: Path, capsys: Capture) -> None:
    verifier = data_dir / "C_speculators" / "verifier"
    draft = full_speculators_draft(data_dir, tmp_path / "draft")
    finished = converted(capsys, draft, tmp_path / "out", "--to", "deepspec", "--target", verifier)
    assert "embed_tokens.weight: taken from the target\n" in finished.err
    assert "lm_head.weight: taken from the target\n" in finished.err
    written, stored, target = tensors_of(tmp_path / "out"), tensors_of(draft), tensors_of(verifier)
    tables = {"embed_tokens.weight": target["model.embed_tokens.weight"], "lm_head.weight": target["lm_head.weight"]}
    assert_same_bits(written, {**stored, **tables})
    assert json_of(tmp_path / "out")["num_target_layers"] == 6
    assert json_of(tmp_path / "out")["target_layer_ids"] == [0, 2, 4]
    assert config_of(tmp_path / "out") == config_of(draft)


def test_the_head_of_a_tied_target_is_its_embedding(data_dir: Path, tmp_path: Path, capsys: Capture) -> None:
    target = copied(data_dir / "C_speculators" / "verifier", tmp_path / "target", tie_word_embeddings=True)
    changed_tensors(target, lambda tensors: tensors.pop("lm_head.weight"))
    converted(
        capsys,
        full_speculators_draft(data_dir, tmp_path / "draft"),
        tmp_path / "out",
        "--to",
        "deepspec",
        "--target",
        target,
    )
    written = tensors_of(tmp_path / "out")
    assert written["lm_head.weight"].tobytes() == written["embed_tokens.weight"].tobytes()


def test_a_target_tells_its_architecture(data_dir: Path, tmp_path: Path, capsys: Capture) -> None:
    source = data_dir / "D_loop" / "draft"
    converted(
        capsys,
        source,
        tmp_path / "out",
        "--to",
        "speculators",
        "--target",
        data_dir / "D_loop" / "target",
        "--target-name",
        "../target",
    )
    assert json_of(tmp_path / "out")["speculators_config"]["verifier"] == {
        "name_or_path": "../target",
        "architectures": ["Qwen3ForCausalLM"],
    }


def test_a_target_without_a_name_is_said_to_have_none(data_dir: Path, tmp_path: Path, capsys: Capture) -> None:
    finished = converted(capsys, data_dir / "D_loop" / "draft", tmp_path / "out", "--to", "speculators")
    assert finished.err.splitlines()[0] == (
        "speculators_config.verifier.name_or_path: null is written; --target-name NAME states it for readers that "
        "find the target by it"
    )


def test_every_tensor_keeps_its_own_dtype(data_dir: Path, tmp_path: Path, capsys: Capture) -> None:
    def mix(tensors: dict[str, np.ndarray]) -> None:
        for name in tensors:
            tensors[name] = tensors[name].astype(
                np.float16 if "layers.0" in name else ml_dtypes.bfloat16 if "layers.1" in name else np.float32
            )

    source = changed_tensors(copied(data_dir / "A_deepspec_qwen3" / "rnn", tmp_path / "source"), mix)
    converted(capsys, source, tmp_path / "there", "--to", "speculators")
    assert {tensor.dtype.name for tensor in tensors_of(tmp_path / "there").values()} == {
        "float32",
        "float16",
        "bfloat16",
    }
    assert_same_bits(tensors_of(source), tensors_of(tmp_path / "there"))


def test_a_confidence_bias_that_is_not_there_is_written_as_zero(
    data_dir: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Readers of the published format require the tensor."""
    source = copied(data_dir / "A_deepspec_qwen3" / "vanilla_bf16disk", tmp_path / "source")
    changed_tensors(source, lambda tensors: tensors.pop("confidence_head.proj.bias"))
    finished = converted(capsys, source, tmp_path / "out", "--to", "speculators")
    assert "confidence_head.proj.bias: zero is written, as the draft has none\n" in finished.err
    bias = tensors_of(tmp_path / "out")["confidence_head.proj.bias"]
    assert (bias.dtype.name, bias.tolist()) == ("bfloat16", [0.0])


def test_what_only_training_needs_or_nobody_knows_is_left_behind(
    data_dir: Path, tmp_path: Path, capsys: Capture
) -> None:
    draft = full_speculators_draft(data_dir, tmp_path / "draft", shiny_new_field=3)
    plain = tensors_of(draft)
    zeros = np.zeros((199,), np.int64)
    changed_tensors(
        draft,
        lambda t: t.update(
            {"verifier_norm.weight": np.ones(64, np.float32), "d2t": zeros, "t2d": np.ones(199, np.bool_)}
        ),
    )
    finished = converted(
        capsys, draft, tmp_path / "out", "--to", "deepspec", "--target", data_dir / "C_speculators" / "verifier"
    )
    assert "shiny_new_field: not carried over, a field of no known meaning\n" in finished.err
    assert tensors_of(tmp_path / "out").keys() == plain.keys() | {"embed_tokens.weight", "lm_head.weight"}


def test_a_layout_that_the_file_leaves_open_is_decided_aloud_and_can_be_stated(
    data_dir: Path, tmp_path: Path, capsys: Capture
) -> None:
    verifier = data_dir / "C_speculators" / "verifier"
    draft = full_speculators_draft(data_dir, tmp_path / "draft")
    raw = json_of(draft)
    del raw["sample_from_anchor"], raw["speculators_config"]["proposal_methods"]
    (draft / "config.json").write_text(json.dumps(raw))
    finished = converted(capsys, draft, tmp_path / "out", "--to", "deepspec", "--target", verifier)
    assert "sample_from_anchor: taken as true (the file does not say; default of the format)\n" in finished.err
    said = refused(
        capsys, tmp_path, draft, tmp_path / "other", "--to", "deepspec", "--target", verifier, "--no-sample-from-anchor"
    )
    assert said.endswith("sample_from_anchor: found False, allowed true: drafts of the format are anchor-first")


def test_a_plain_zlab_draft_becomes_a_speculators_dflash_draft(tmp_path: Path, capsys: Capture) -> None:
    draft = zlab_draft(tmp_path / "draft")
    converted(capsys, draft, tmp_path / "out", "--to", "speculators", "--target-name", "org/target")
    assert (json_of(tmp_path / "out")["architectures"], json_of(tmp_path / "out")["sample_from_anchor"]) == (
        ["DFlashDraftModel"],
        False,
    )
    assert_same_bits(tensors_of(draft), tensors_of(tmp_path / "out"))
    assert config_of(draft) == config_of(tmp_path / "out")


def test_causality_that_one_reader_alone_knows_is_pointed_out(tmp_path: Path, capsys: Capture) -> None:
    draft = zlab_draft(tmp_path / "draft", dflash_config={**tiny_families.ZLAB_BLOCK, "is_causal": True})
    finished = converted(capsys, draft, tmp_path / "out", "--to", "speculators")
    assert "causal: true is written; not every reader of the format knows this field\n" in finished.err
