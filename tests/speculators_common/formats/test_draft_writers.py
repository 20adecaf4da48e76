"""What a writer writes, the format's reader reads as the very same draft; what a format has no words for is refused in
one error that names it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from dspark_jax.speculators_common.formats.compact.format import from_compact
from dspark_jax.speculators_common.formats.deepspec.gemma4_reader import from_deepspec_gemma4
from dspark_jax.speculators_common.formats.deepspec.gemma4_writer import to_deepspec_gemma4
from dspark_jax.speculators_common.formats.deepspec.reader import from_deepspec
from dspark_jax.speculators_common.formats.deepspec.writer import to_deepspec
from dspark_jax.speculators_common.formats.draft_config import (
    DraftConfig,
    DraftOverrides,
    LayerMask,
)
from dspark_jax.speculators_common.formats.rope.config import RopeConfig
from dspark_jax.speculators_common.formats.speculators.reader import from_speculators
from dspark_jax.speculators_common.formats.speculators.writer import to_speculators
from dspark_jax.speculators_common.formats.zlab.reader import from_zlab
from dspark_jax.speculators_common.formats.zlab.writer import to_zlab
from tests.support import tiny_families
from tests.support.written_configs import (
    CAUSAL_FULL,
    FULL,
    NON_CAUSAL,
    SLIDING,
    assert_read_back,
    refusal,
    through_json,
)

DATA = Path(__file__).parents[2] / "data"
DEEPSPEC = [*sorted((DATA / "A_deepspec_qwen3").iterdir()), DATA / "D_loop" / "draft"]
GEMMA4 = sorted((DATA / "B_deepspec_gemma4").iterdir())
SPECULATORS = [folder for folder in sorted((DATA / "C_speculators").iterdir()) if folder.name != "verifier"] + [
    DATA / "speculators_gemma4_31b",
    Path(__file__).parents[3] / "models" / "smollm2-135m-dspark",
]
ROPES = {
    "default": RopeConfig(theta=5e5, rotary_dim=16),
    "linear": RopeConfig(theta=1e4, rotary_dim=16, kind="linear", factor=2.5),
    "llama3": RopeConfig(
        theta=5e5,
        rotary_dim=16,
        kind="llama3",
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
    "yarn": RopeConfig(
        theta=1e6,
        rotary_dim=16,
        kind="yarn",
        factor=4.0,
        original_max_position_embeddings=32768,
        attention_factor=0.1 * math.log(4.0) + 1.0,
    ),
    "yarn, own values": RopeConfig(
        theta=1e6,
        rotary_dim=16,
        kind="yarn",
        factor=1.5,
        original_max_position_embeddings=64,
        attention_factor=0.7,
        beta_fast=9.0,
        beta_slow=0.25,
    ),
    "linear, with its original length": RopeConfig(
        theta=1e6, rotary_dim=16, kind="linear", factor=2.0, original_max_position_embeddings=4096
    ),
}


def raw(folder: Path, name: str = "config.json") -> dict[str, Any]:
    return json.loads((folder / name).read_text())


def speculators(**changes: Any) -> DraftConfig:
    """A speculators draft of two full layers over 61 of 199 ids."""
    config = from_speculators(raw(DATA / "C_speculators" / "pruned_anchor_full_vanilla"), "draft/config.json")
    return dataclasses.replace(config, **changes)


def deepspec(**changes: Any) -> DraftConfig:
    return dataclasses.replace(
        from_deepspec(raw(DATA / "A_deepspec_qwen3" / "vanilla"), "draft/config.json"), **changes
    )


def gemma4(**changes: Any) -> DraftConfig:
    config = from_deepspec_gemma4(raw(DATA / "B_deepspec_gemma4" / "keqv_softcap_vanilla"), "draft/config.json")
    return dataclasses.replace(config, **changes)


@pytest.mark.parametrize("folder", SPECULATORS, ids=lambda folder: folder.name)
def test_a_speculators_draft_is_written_as_it_was_read(folder: Path) -> None:
    config = from_speculators(raw(folder), folder / "config.json")
    assert_read_back(config, to_speculators(config), from_speculators)


@pytest.mark.parametrize("folder", DEEPSPEC, ids=lambda folder: folder.name)
def test_a_deepspec_draft_is_written_as_it_was_read(folder: Path) -> None:
    config = from_deepspec(raw(folder), folder / "config.json")
    assert_read_back(config, to_deepspec(config), from_deepspec)


@pytest.mark.parametrize("folder", GEMMA4, ids=lambda folder: folder.name)
def test_a_deepspec_gemma4_draft_is_written_as_it_was_read(folder: Path) -> None:
    config = from_deepspec_gemma4(raw(folder), folder / "config.json")
    assert_read_back(config, to_deepspec_gemma4(config), from_deepspec_gemma4)


@pytest.mark.parametrize("folder", SPECULATORS[:-2], ids=lambda folder: folder.name)
def test_nothing_that_the_library_writes_about_the_draft_is_left_out_or_written_otherwise(folder: Path) -> None:
    """What is left out are the writer's own marks and what belongs to training."""
    stored, written = raw(folder), through_json(to_speculators(from_speculators(raw(folder), folder), dtype="float32"))
    marks = {"auto_map", "speculators_version", "transformers_version"}
    assert {name: value for name, value in stored.items() if name not in marks | {"transformer_layer_config"}} == {
        name: value for name, value in written.items() if name != "transformer_layer_config"
    }
    training = {
        "attention_dropout",
        "bos_token_id",
        "eos_token_id",
        "initializer_range",
        "max_window_layers",
        "pad_token_id",
        "use_cache",
    }
    network = stored["transformer_layer_config"]
    assert {name: value for name, value in network.items() if name not in training} == written[
        "transformer_layer_config"
    ]


@pytest.mark.parametrize("folder", DEEPSPEC, ids=lambda folder: folder.name)
def test_nothing_that_deepspec_writes_about_the_draft_is_left_out_or_written_otherwise(folder: Path) -> None:
    stored, dtype = raw(folder), raw(folder)["dtype"]
    written = through_json(to_deepspec(from_deepspec(stored, folder), dtype=dtype))
    others = {
        "attention_dropout",
        "bos_token_id",
        "eos_token_id",
        "initializer_range",
        "max_window_layers",
        "num_anchors",
        "pad_token_id",
    }
    others |= {"transformers_version", "use_cache"}
    assert {name: value for name, value in stored.items() if name not in others} == {
        name: value for name, value in written.items() if name != "num_anchors"
    }
    assert written["num_anchors"] > 0, "the reference does not start without it"


def test_the_two_formats_count_the_same_taps_differently() -> None:
    config = deepspec(taps=(0, 3, 5))
    assert to_deepspec(config)["target_layer_ids"] == [-1, 2, 4]
    assert to_speculators(config)["aux_hidden_state_layer_ids"] == [0, 3, 5]


def test_a_deepspec_draft_reads_the_same_as_a_speculators_one() -> None:
    for folder in DEEPSPEC:
        config = from_deepspec(raw(folder), folder / "config.json")
        assert_read_back(config, to_speculators(config), from_speculators)


@pytest.mark.parametrize(("anchor_first", "declared"), [(True, 5), (False, 4)])
def test_declared_drafts_follow_the_layout(anchor_first: bool, declared: int) -> None:
    fields = to_speculators(speculators(sample_from_anchor=anchor_first))
    assert fields["sample_from_anchor"] is anchor_first
    assert fields["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == declared


@pytest.mark.parametrize(
    "layers",
    [
        (FULL, FULL),
        (SLIDING, SLIDING),
        (FULL, SLIDING),
        (NON_CAUSAL, NON_CAUSAL),
        (FULL, NON_CAUSAL),
        (CAUSAL_FULL, CAUSAL_FULL),
        (CAUSAL_FULL, SLIDING),
    ],
)
def test_every_mixture_of_layers_that_the_speculators_format_knows(layers: tuple[LayerMask, ...]) -> None:
    config = speculators(layers=layers)
    fields = to_speculators(config)
    assert_read_back(config, fields, from_speculators)
    windows = [layer.window for layer in layers if layer.window]
    assert fields["transformer_layer_config"]["sliding_window"] == (windows[0] if windows else None)
    assert ("causal" in fields) is (CAUSAL_FULL in layers), (
        "a field that only one reader knows is written only where it is needed"
    )


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_every_rotation_is_written_and_read_alike(rope: RopeConfig) -> None:
    own = {"rope": rope, "max_position_embeddings": 4 * 32768}  # no less than any of the rotations serves
    assert_read_back(deepspec(**own), to_deepspec(deepspec(**own)), from_deepspec)
    assert_read_back(speculators(**own), to_speculators(speculators(**own)), from_speculators)


@pytest.mark.parametrize("head_dim", [2, 6, 14, 32, 46, 98, 256])
def test_a_partial_rotation_of_gemma4_heads_is_met_exactly(head_dim: int) -> None:
    sizes = {"head_dim": head_dim}
    for pairs in range(head_dim // 2 + 1):
        config = gemma4(
            rope=RopeConfig(theta=1e6, rotary_dim=head_dim, kind="proportional", rotating_pairs=pairs, factor=1.5),
            **sizes,
        )
        assert_read_back(config, to_deepspec_gemma4(config), from_deepspec_gemma4)
    for width in range(2, head_dim + 1, 2):
        config = gemma4(rope=RopeConfig(theta=1e4, rotary_dim=width), **sizes)
        assert_read_back(config, to_deepspec_gemma4(config), from_deepspec_gemma4)


def test_sizes_and_heads_at_their_edges() -> None:
    for changes in (
        {"draft_vocab_size": 256},  # a head padded beyond the vocabulary
        {"target_hidden_size": 96},
        {"markov_rank": 0, "markov_head_type": "none", "confidence_head_with_markov": False},
        {
            "markov_rank": 0,
            "markov_head_type": "none",
            "confidence_head_with_markov": False,
            "enable_confidence_head": False,
        },
        {"enable_confidence_head": False, "confidence_head_with_markov": False},
        {"taps": (0,), "mask_token_id": 0, "block_size": 1, "attention_bias": True, "rms_norm_eps": 1e-5},
        {"block_size": 2, "sample_from_anchor": False},
    ):
        assert_read_back(speculators(**changes), to_speculators(speculators(**changes)), from_speculators)
        if not changes.keys() & {"draft_vocab_size", "target_hidden_size", "sample_from_anchor"}:
            assert_read_back(deepspec(**changes), to_deepspec(deepspec(**changes)), from_deepspec)


def test_a_dflash_draft_stays_one() -> None:
    config = from_speculators(tiny_families.speculators_dflash_config(), "draft/config.json")
    fields = to_speculators(config)
    assert (fields["architectures"], fields["speculators_model_type"]) == (["DFlashDraftModel"], "dflash")
    assert fields["speculators_config"]["algorithm"] == "dflash"
    assert "markov_rank" not in fields
    assert_read_back(config, fields, from_speculators)


def test_a_zlab_draft_without_extras_is_a_speculators_one() -> None:
    config = from_zlab(tiny_families.zlab_config(), "draft/config.json")
    fields = to_speculators(config)
    assert fields["aux_hidden_state_layer_ids"] == [1, 2]
    assert_read_back(config, fields, from_speculators)


def test_a_draft_made_in_a_program_without_a_length_is_in_no_format() -> None:
    """The published constructor allows it; a file that said null could not be read."""
    for write, config in ((to_speculators, speculators()), (to_deepspec, deepspec()), (to_deepspec_gemma4, gemma4())):
        said = refusal(write, dataclasses.replace(config, max_position_embeddings=None))
        assert said.endswith("max_position_embeddings: found None, allowed an integer >= 1, as every file states it")


@pytest.mark.parametrize(("stated", "written"), [(None, 5), (1, 1), (3, 3), (4, 5), (5, 5)])
def test_the_number_of_drafts_that_a_file_states_is_kept(stated: int | None, written: int) -> None:
    """But for the number of a whole block of the other layout, which would say that the block is of that one."""
    config = speculators(stated_drafts=stated)
    fields = to_speculators(config)
    assert fields["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == written
    assert_read_back(config, fields, from_speculators)


INEXPRESSIBLE = [
    (
        to_speculators,
        {"embedding_scale": 2.0},
        "input_embedding_scale: found 2.0, allowed 1.0, as the format has no such field",
    ),
    (
        to_speculators,
        {"output_multiplier": 0.5},
        "output_multiplier: found 0.5, allowed 1.0, as the format has no such field",
    ),
    (
        to_speculators,
        {"final_logit_softcapping": 30.0},
        "final_logit_softcapping: found 30.0, allowed None, as the format has no such field",
    ),
    (
        to_speculators,
        {"rope": RopeConfig(theta=1e4, rotary_dim=4)},
        "partial_rotary_factor: found 0.25, allowed 1.0: readers of the format rotate the whole head",
    ),
    (
        to_speculators,
        {"rope": RopeConfig(theta=1e4, rotary_dim=16, kind="proportional")},
        "rope_type: found 'proportional', allowed default, linear, llama3 or yarn",
    ),
    (
        to_speculators,
        {"layers": (SLIDING, FULL), "window_origin": "query"},
        "sliding_window: found 6, allowed a window counted from the anchor; this draft's is counted from each query "
        "slot",
    ),
    (
        to_speculators,
        {"layers": (SLIDING, LayerMask(window=7, causal=True))},
        "sliding_window: found [6, 7], allowed one window for all sliding layers",
    ),
    (
        to_speculators,
        {"layers": (SLIDING, NON_CAUSAL)},
        "causal: found [True, False], allowed the same for all sliding layers and for all full ones, and causal full "
        "layers only if all are causal",
    ),
    (
        to_speculators,
        {"layers": (CAUSAL_FULL, NON_CAUSAL)},
        "causal: found [True, False], allowed the same for all sliding layers and for all full ones, and causal full "
        "layers only if all are causal",
    ),
    (
        to_deepspec,
        {"sample_from_anchor": False},
        "sample_from_anchor: found False, allowed true: drafts of the format are anchor-first",
    ),
    (
        to_deepspec,
        {"draft_vocab_size": 61},
        "draft_vocab_size: found 61, allowed 199 (vocab_size): the format has no draft vocabulary",
    ),
    (
        to_deepspec,
        {"draft_vocab_size": 256},
        "draft_vocab_size: found 256, allowed 199 (vocab_size): the format has no draft vocabulary",
    ),
    (
        to_deepspec,
        {"target_hidden_size": 96},
        "target_hidden_size: found 96, allowed 64 (hidden_size): the format knows one width",
    ),
    (
        to_deepspec,
        {"layers": (SLIDING, FULL)},
        "layer_types: found ['window 6', 'full_attention'], allowed full_attention in every layer",
    ),
    (
        to_deepspec,
        {"layers": (FULL, CAUSAL_FULL)},
        "causal: found [False, True], allowed false in every layer: blocks of the format are bidirectional",
    ),
    (
        to_deepspec,
        {"num_target_layers": None},
        "num_target_layers: found None, allowed the number of layers of the target (--target tells it)",
    ),
    (
        to_deepspec,
        {"num_target_layers": 5},
        "taps: found [2, 3, 5], allowed taps below the last of the target's 5 layers",
    ),
    (
        to_deepspec,
        {"final_logit_softcapping": 5.0},
        "final_logit_softcapping: found 5.0, allowed None, as the format has no such field",
    ),
]


@pytest.mark.parametrize(("write", "changes", "said"), INEXPRESSIBLE)
def test_what_a_format_has_no_words_for_is_refused_by_name(write: Any, changes: dict[str, Any], said: str) -> None:
    title = "speculators" if write is to_speculators else "DeepSpec"
    assert refusal(write, deepspec(**changes)) == f"draft/config.json: cannot be written in the {title} format: {said}"


def test_everything_at_fault_is_said_at_once() -> None:
    said = refusal(to_deepspec, speculators(sample_from_anchor=False, layers=(SLIDING, SLIDING)))
    for field in ("sample_from_anchor", "draft_vocab_size", "layer_types", "num_target_layers"):
        assert f"{field}: found" in said


@pytest.mark.parametrize("write", [to_speculators, to_deepspec, to_zlab])
def test_other_networks_are_refused_by_their_style(write: Any) -> None:
    assert (
        "architectures: found 'Gemma4DSparkModel', allowed a draft of Qwen3 layers; this one has layers of the gemma4 "
        "style" in refusal(write, gemma4())
    )
    folder = DATA / "H_compact" / "markov"
    compact = from_compact(raw(folder, "dspark.json"), folder / "dspark.json")
    assert "architectures: found 'DsparkDrafter', allowed a draft of Qwen3 layers" in refusal(write, compact)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            deepspec(),
            "architectures: found 'Qwen3DSparkModel', allowed a draft of Gemma4 layers; this one has layers of the "
            "qwen3 style",
        ),
        (gemma4(embedding_scale=1.0), "embedding_scale: found 1.0, allowed 8.0, as the format has no such field"),
        (gemma4(output_multiplier=2.0), "output_multiplier: found 2.0, allowed 1.0, as the format has no such field"),
        (gemma4(rope=ROPES["linear"]), "rope_type: found 'linear', allowed default or proportional"),
        (
            gemma4(sample_from_anchor=False),
            "sample_from_anchor: found False, allowed true: drafts of the format are anchor-first",
        ),
    ],
)
def test_what_gemma4_drafts_cannot_be_is_refused_by_name(config: DraftConfig, said: str) -> None:
    assert (
        refusal(to_deepspec_gemma4, config)
        == f"draft/config.json: cannot be written in the DeepSpec Gemma4 format: {said}"
    )


def test_a_rotation_that_only_the_user_stated_is_no_part_of_a_file() -> None:
    overridden = from_deepspec(
        raw(DATA / "A_deepspec_qwen3" / "vanilla"), "draft/config.json", DraftOverrides(partial_rotary_factor=0.5)
    )
    assert "partial_rotary_factor: found 0.5" in refusal(to_deepspec, overridden)
