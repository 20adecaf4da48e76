"""`dspark convert` names in one line what it refuses, and leaves no files behind after any failure."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.pipelines.checkpoints import conversion
from dspark_jax.pipelines.checkpoints.draft_equality import check_equal_drafts
from dspark_jax.pipelines.checkpoints.loading import load_draft, load_target
from dspark_jax.speculators_common.errors import CheckpointError, DSparkError
from dspark_jax.speculators_common.files.safetensors_file import write_safetensors
from dspark_jax.speculators_common.formats.draft_config import DraftConfig
from dspark_jax.speculators_common.formats.rope.config import RopeConfig
from tests.support import tiny_families
from tests.support.draft_conversions import Capture, changed_tensors, full_speculators_draft, refused, zlab_draft
from tests.support.recorded_variants import GEMMA4_VARIANTS
from tests.support.text_pair import copied, dspark

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_missing_tables_and_depth_are_asked_for(data_dir: Path, tmp_path: Path, capsys: Capture) -> None:
    draft = full_speculators_draft(data_dir, tmp_path / "draft")
    said = refused(capsys, tmp_path, draft, tmp_path / "out", "--to", "deepspec")
    assert said == (
        f"{draft}/config.json: cannot be written in the DeepSpec format: num_target_layers: found None, "
        "allowed the number of layers of the target (--target tells it)"
    )
    with_depth = full_speculators_draft(data_dir, tmp_path / "with depth", num_target_layers=6)
    said = refused(capsys, tmp_path, with_depth, tmp_path / "out", "--to", "deepspec")
    assert said == (
        f"{with_depth}: tensor embed_tokens.weight, lm_head.weight: missing, allowed a checkpoint that holds it, as "
        "every DeepSpec draft does, "
        "or --target DIR with the draft's target ('../verifier' by its config)"
    )


def test_the_wrong_target_is_refused(data_dir: Path, tmp_path: Path, capsys: Capture) -> None:
    draft = full_speculators_draft(data_dir, tmp_path / "draft")
    target = tiny_families.tiny_target().write(tmp_path / "target")
    said = refused(capsys, tmp_path, draft, tmp_path / "out", "--to", "deepspec", "--target", target)
    assert said.startswith(f"{draft}/config.json: does not fit the target {target}/config.json (Qwen3ForCausalLM): ")
    assert "hidden size: the draft expects 64, the target has 32" in said
    said = refused(
        capsys, tmp_path, draft, tmp_path / "out", "--to", "deepspec", "--target", data_dir / "D_loop" / "draft"
    )
    assert said.endswith("architectures: found 'Qwen3DSparkModel', a draft, allowed a target")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"dflash_config": {**tiny_families.ZLAB_BLOCK, "output_multiplier": 0.5}},
            "output_multiplier: found 0.5, allowed 1.0",
        ),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6},
            "sliding_window: found 6, allowed a window counted from the anchor",
        ),
    ],
)
def test_a_zlab_draft_with_extras_is_refused(
    fields: dict[str, Any], said: str, tmp_path: Path, capsys: Capture
) -> None:
    assert said in refused(
        capsys, tmp_path, zlab_draft(tmp_path / "draft", **fields), tmp_path / "out", "--to", "speculators"
    )


@pytest.mark.parametrize(
    ("variant", "fields"),
    [
        ("pruned_anchor_full_vanilla", ["draft_vocab_size: found 61, allowed 199"]),
        (
            "pruned_noanchor_full_vanilla",
            ["sample_from_anchor: found False, allowed true", "draft_vocab_size: found 61"],
        ),
        (
            "pruned_anchor_sliding_gated",
            ["draft_vocab_size: found 61", "layer_types: found ['window 6', 'window 6'], allowed full_attention"],
        ),
        (
            "full_noanchor_mixed_rnn",
            ["sample_from_anchor: found False", "layer_types: found ['window 6', 'full_attention']"],
        ),
        ("full_anchor_mixed_rnn", ["layer_types: found ['full_attention', 'window 6']"]),
        ("full_anchor_slidingnoncausal_vanilla", ["layer_types: found ['window 6', 'window 6']"]),
        ("pruned_anchor_full_rank0", ["draft_vocab_size: found 61"]),
        (
            "pruned_noanchor_sliding_gated_noconf",
            ["sample_from_anchor: found False", "draft_vocab_size: found 61", "layer_types: found"],
        ),
        ("legacy_pruned_anchor_full_vanilla", ["draft_vocab_size: found 61"]),
        ("legacy_full_anchor_mixed_gated", ["layer_types: found ['full_attention', 'window 6']"]),
    ],
)
def test_a_recorded_speculators_draft_beyond_deepspec_is_refused(
    variant: str, fields: list[str], data_dir: Path, tmp_path: Path, capsys: Capture
) -> None:
    draft, verifier = data_dir / "C_speculators" / variant, data_dir / "C_speculators" / "verifier"
    said = refused(capsys, tmp_path, draft, tmp_path / "out", "--to", "deepspec", "--target", verifier)
    assert said.startswith(f"{draft}/config.json: cannot be written in the DeepSpec format: {fields[0]}")
    assert all(field in said for field in fields)
    assert said.count(": found ") == len(fields)


@pytest.mark.parametrize("variant", GEMMA4_VARIANTS)
def test_a_gemma4_draft_has_no_counterpart(variant: str, data_dir: Path, tmp_path: Path, capsys: Capture) -> None:
    draft = data_dir / "B_deepspec_gemma4" / variant
    assert refused(capsys, tmp_path, draft, tmp_path / "out", "--to", "speculators") == (
        f"{draft}/config.json: cannot be written in the speculators format: architectures: found 'Gemma4DSparkModel', "
        "allowed a draft of Qwen3 layers; this one has layers of the gemma4 style"
    )


@pytest.mark.parametrize(("to", "title"), [("speculators", "speculators"), ("deepspec", "DeepSpec")])
def test_a_compact_draft_has_no_counterpart(
    to: str, title: str, data_dir: Path, tmp_path: Path, capsys: Capture
) -> None:
    draft = data_dir / "H_compact" / "markov"
    said = refused(capsys, tmp_path, draft, tmp_path / "out", "--to", to)
    assert said.startswith(
        f"{draft}/dspark.json: cannot be written in the {title} format: architectures: found 'DsparkDrafter', allowed "
    )


@pytest.mark.parametrize(
    ("folder", "to", "said"),
    [
        (
            "D_loop/draft",
            "deepspec",
            "found 'Qwen3DSparkModel', allowed a draft that is not in the DeepSpec format already",
        ),
        (
            "B_deepspec_gemma4/unified_keqv_softcap",
            "deepspec",
            "found 'Gemma4DSparkModel', allowed a draft that is not in the DeepSpec format already",
        ),
        (
            "C_speculators/full_anchor_mixed_rnn",
            "speculators",
            "found 'DSparkDraftModel', allowed a draft that is not in the speculators format already",
        ),
        ("D_loop/target", "speculators", "found 'Qwen3ForCausalLM', a target, allowed a draft"),
    ],
)
def test_what_is_no_draft_of_the_other_format_is_refused(
    folder: str, to: str, said: str, data_dir: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert (
        refused(capsys, tmp_path, data_dir / folder, tmp_path / "out", "--to", to)
        == f"{data_dir / folder}/config.json: architectures: {said}"
    )


@pytest.mark.parametrize("kind", ["empty directory", "directory", "file", "broken link"])
def test_an_existing_destination_is_refused_before_anything_is_read(kind: str, tmp_path: Path, capsys: Capture) -> None:
    destination = tmp_path / "out"
    if kind == "file":
        destination.write_text("mine")
    elif kind == "broken link":
        destination.symlink_to("nowhere")
    else:
        destination.mkdir()
        if kind == "directory":
            (destination / "mine").touch()
    said = refused(capsys, tmp_path, tmp_path / "no draft", destination, "--to", "deepspec")
    assert said == f"{destination}: exists already, allowed a path where nothing is"


def test_a_source_that_cannot_be_loaded_is_refused(data_dir: Path, tmp_path: Path, capsys: Capture) -> None:
    assert (
        refused(capsys, tmp_path, tmp_path / "none", tmp_path / "out", "--to", "deepspec")
        == f"{tmp_path / 'none'}: no such directory"
    )
    draft = copied(data_dir / "D_loop" / "draft", tmp_path / "draft")
    changed_tensors(draft, lambda tensors: (tensors.pop("norm.weight"), tensors.update(more=np.ones(2, np.float32))))
    said = refused(capsys, tmp_path, draft, tmp_path / "out", "--to", "speculators")
    assert (
        said == f"{draft}: tensor norm.weight: missing, expected shape [64]; model.safetensors: tensor more: unexpected"
    )
    (draft / "mask_embedding.pt").touch()
    changed_tensors(
        draft, lambda tensors: (tensors.pop("more"), tensors.update({"norm.weight": np.ones(64, np.float32)}))
    )
    assert "mask_embedding.pt: a mask embedding in a file of its own is not supported" in refused(
        capsys, tmp_path, draft, tmp_path / "out", "--to", "speculators"
    )


def test_wrong_arguments_are_refused(tmp_path: Path, capsys: Capture) -> None:
    assert "--to" in refused(capsys, tmp_path, "a", tmp_path / "out")
    assert "argument --to: invalid choice: 'gguf'" in refused(capsys, tmp_path, "a", tmp_path / "out", "--to", "gguf")
    said = refused(capsys, tmp_path, "a", tmp_path / "out", "--to", "deepspec", "--target-name", "org/target")
    assert said == "target name: found 'org/target', allowed none: the DeepSpec format has no field for it"
    with pytest.raises(DSparkError, match=r"format: found 'gguf', allowed speculators, deepspec"):
        conversion.convert_draft("a", tmp_path / "out", "gguf")


def test_the_help_says_what_goes_where(capsys: Capture) -> None:
    finished = dspark(capsys, "convert", "--help")
    assert finished.status == 0
    for said in (
        "--to {speculators,deepspec}",
        "--target DIR|ORG/NAME|GGUF|smollm2",
        "--target-name NAME",
        "have no counterpart",
        "bit for bit",
    ):
        assert said in finished.out


def test_a_config_that_reads_otherwise_is_found_by_the_check_and_nothing_is_left(
    data_dir: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A faulty writer: it writes the tap ids of one convention under the field of the other."""
    right = conversion.FORMATS["speculators"]

    def wrong(config: DraftConfig, **options: Any) -> dict[str, Any]:
        return {**right.write(config, **options), "aux_hidden_state_layer_ids": [1, 2, 4]}

    monkeypatch.setattr(conversion, "FORMATS", {"speculators": dataclasses.replace(right, write=wrong)})
    source = data_dir / "A_deepspec_qwen3" / "vanilla"
    said = refused(capsys, tmp_path, source, tmp_path / "out", "--to", "speculators")
    assert said.endswith(f"taps: found (1, 2, 4), allowed (2, 3, 5) as in {source}/config.json")


def test_a_single_bit_is_found_by_the_check_and_nothing_is_left(
    data_dir: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flipped(file: Path, tensors: dict[str, np.ndarray]) -> None:
        tensors["layers.1.mlp.down_proj.weight"].view(np.uint32)[3, 5] ^= 1
        write_safetensors(file, tensors)

    monkeypatch.setattr(conversion, "write_safetensors", flipped)
    said = refused(capsys, tmp_path, data_dir / "A_deepspec_qwen3" / "vanilla", tmp_path / "out", "--to", "speculators")
    assert "parameter layers.1.mlp.down.kernel: found other bits, allowed those of " in said


@pytest.mark.skipif(os.name != "posix", reason="limits as on POSIX systems")
@pytest.mark.parametrize("draft", ["D_loop/draft", "A_deepspec_qwen3/gated"])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    data_dir: Path, tmp_path: Path, capsys: Capture, draft: str
) -> None:
    """A file that may not grow fails as on a full disk, for the process and for the library that writes tensors."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        said = refused(capsys, tmp_path, data_dir / draft, tmp_path / "out", "--to", "speculators")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "out: cannot be written: " in said
    assert "File too large" in said


def test_drafts_that_differ_only_in_what_they_compute_are_told_apart(data_dir: Path) -> None:
    """The check runs the modules, because configs and parameters are equal here."""
    target = load_target(data_dir / "D_loop" / "target", jnp.float32)
    first, second = (load_draft(data_dir / "D_loop" / "draft", target, jnp.float32) for _ in range(2))
    assert check_equal_drafts(first, second) == 27
    second.module.config = dataclasses.replace(second.config, rope=RopeConfig(theta=9999.0, rotary_dim=16))
    with pytest.raises(CheckpointError, match="slot states of a block: found other bits"):
        check_equal_drafts(first, second)


def test_drafts_with_other_parameters_are_told_apart(data_dir: Path) -> None:
    target = load_target(data_dir / "C_speculators" / "verifier", jnp.float32)
    first = load_draft(data_dir / "C_speculators" / "full_anchor_mixed_rnn", target, jnp.float32)
    second = dataclasses.replace(
        first,
        module=load_draft(
            data_dir / "C_speculators" / "full_anchor_slidingnoncausal_vanilla", target, jnp.float32
        ).module,
    )
    with pytest.raises(
        CheckpointError, match=r"parameters: found .*markov_head\.joint.* in one of two drafts, allowed those of "
    ):
        check_equal_drafts(first, second)
