"""The text model of a multimodal checkpoint is found in every layout. Only tensors of other towers are ignored."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from dspark_jax.architectures.drafting.tables import DraftTables
from dspark_jax.pipelines.checkpoints.checkpoint import open_checkpoint
from dspark_jax.pipelines.checkpoints.loading import load_target, with_target_rows
from dspark_jax.pipelines.text.stop_tokens import stop_ids, stop_tokens
from dspark_jax.speculators_common.errors import CheckpointError
from dspark_jax.speculators_common.formats.speculators.reader import from_speculators

UNIFIED, E2B = "gemma4_unified_multimodal_layout", "gemma4_text_e2b_like"


def write(folder: Path, config: dict, tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def stored(folder: Path) -> tuple[dict, dict[str, np.ndarray]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def leaves(folder: Path) -> list[np.ndarray]:
    return jax.tree.leaves(nnx.state(load_target(folder, jnp.float32).module))


@pytest.mark.parametrize(
    ("prefix", "tower"),
    [("model.language_model.", "model.vision_tower.x.weight"), ("language_model.model.", "multi_modal_projector.y")],
)
def test_gemma3_text_is_found_in_both_multimodal_layouts(
    data_dir: Path, tmp_path: Path, prefix: str, tower: str
) -> None:
    folder = data_dir / "E_targets" / "gemma3_text"
    config, tensors = stored(folder)
    moved = {prefix + name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config, "vision_config": {}}
    multimodal = write(tmp_path / "multimodal", whole, {**moved, tower: np.ones(3, np.float32)})
    for found, wanted in zip(leaves(multimodal), leaves(folder), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_tensor_of_no_known_tower_is_refused(data_dir: Path, tmp_path: Path) -> None:
    config, tensors = stored(data_dir / "E_targets" / UNIFIED)
    tensors |= {
        "model.smell_tower.weight": np.ones(3, np.float32),
        "model.language_model.layers.0.extra": np.ones(3, np.float32),
    }
    with pytest.raises(CheckpointError) as caught:
        load_target(write(tmp_path / "odd", config, tensors), jnp.float32)
    assert "tensor model.smell_tower.weight: unexpected" in str(caught.value)
    assert "tensor model.language_model.layers.0.extra: unexpected" in str(caught.value)
    assert "vision_embedder" not in str(caught.value)


def test_a_text_checkpoint_has_no_towers_to_skip(data_dir: Path, tmp_path: Path) -> None:
    config, tensors = stored(data_dir / "E_targets" / E2B)
    with pytest.raises(CheckpointError, match=r"tensor model\.vision_tower\.x: unexpected"):
        load_target(
            write(tmp_path / "text", config, {**tensors, "model.vision_tower.x": np.ones(3, np.float32)}), jnp.float32
        )


def test_projections_of_layers_that_read_another_layer_s_cache_may_be_there(data_dir: Path, tmp_path: Path) -> None:
    """Some files store such projections. A layer that stores keys and values of its own must have them."""
    config, tensors = stored(data_dir / "E_targets" / E2B)
    surplus = {
        f"model.layers.5.self_attn.{name}.weight": np.ones((32, 64), np.float32)
        for name in ("k_proj", "v_proj", "k_norm")
    }
    for found, wanted in zip(
        leaves(write(tmp_path / "more", config, tensors | surplus)), leaves(data_dir / "E_targets" / E2B), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)
    del tensors["model.layers.3.self_attn.k_norm.weight"]
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.3\.self_attn\.k_norm\.weight: missing"):
        load_target(write(tmp_path / "less", config, tensors), jnp.float32)


def test_a_pruned_draft_takes_its_head_rows_from_any_layout(data_dir: Path) -> None:
    draft = open_checkpoint(data_dir / "C_speculators" / "pruned_anchor_full_vanilla")
    tensors = {name: tensor for name, tensor in draft.tensors.items() if name != "lm_head.weight"}
    config = from_speculators(draft.config, draft.config_file)
    target = open_checkpoint(data_dir / "E_targets" / UNIFIED)
    shared = with_target_rows(tensors, config, DraftTables(lm_head="target_rows"), target)["lm_head.weight"].read()
    ids = np.arange(61) + draft.tensors["d2t"].read()
    np.testing.assert_array_equal(shared, target.tensors["model.language_model.embed_tokens.weight"].read()[ids])


def test_stop_ids_may_stand_in_the_text_part(data_dir: Path) -> None:
    checkpoint = dataclasses.replace(open_checkpoint(data_dir / "E_targets" / UNIFIED), generation_config={})
    assert "eos_token_id" not in checkpoint.config
    assert stop_ids(stop_tokens(checkpoint, None)) == (1,)
