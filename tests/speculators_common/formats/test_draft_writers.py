"""Each writer is the inverse of the reader of its format."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark_jax.speculators_common.formats.deepspec.gemma4_reader import from_deepspec_gemma4
from dspark_jax.speculators_common.formats.deepspec.gemma4_writer import to_deepspec_gemma4
from dspark_jax.speculators_common.formats.deepspec.reader import from_deepspec
from dspark_jax.speculators_common.formats.deepspec.writer import to_deepspec
from dspark_jax.speculators_common.formats.draft_config import LayerMask
from dspark_jax.speculators_common.formats.rope.config import RopeConfig
from dspark_jax.speculators_common.formats.speculators.reader import from_speculators
from dspark_jax.speculators_common.formats.speculators.writer import to_speculators
from dspark_jax.speculators_common.formats.zlab.reader import from_zlab
from tests.support import tiny_families
from tests.support.draft_configs import DATA, ROPES, deepspec, gemma4, raw, speculators
from tests.support.written_configs import CAUSAL_FULL, FULL, NON_CAUSAL, SLIDING, assert_read_back, through_json

DEEPSPEC = [*sorted((DATA / "A_deepspec_qwen3").iterdir()), DATA / "D_loop" / "draft"]
GEMMA4 = sorted((DATA / "B_deepspec_gemma4").iterdir())
SPECULATORS = [folder for folder in sorted((DATA / "C_speculators").iterdir()) if folder.name != "verifier"] + [
    DATA / "speculators_gemma4_31b",
    Path(__file__).parents[3] / "models" / "smollm2-135m-dspark",
]


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
    """Only fields about the writing library and about training are left out."""
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
    own = {"rope": rope, "max_position_embeddings": 4 * 32768}  # at least the usable length of each rotation
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
        {"draft_vocab_size": 256},  # a head that is padded beyond the target vocabulary
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


@pytest.mark.parametrize(("stated", "written"), [(None, 5), (1, 1), (3, 3), (4, 5), (5, 5)])
def test_the_number_of_drafts_that_a_file_states_is_kept(stated: int | None, written: int) -> None:
    """Except for the number of drafts of a block, in either layout: readers would infer the layout from it."""
    config = speculators(stated_drafts=stated)
    fields = to_speculators(config)
    assert fields["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == written
    assert_read_back(config, fields, from_speculators)
