"""A draft that a format cannot describe is refused with the name of the field and the value found."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dspark_jax.speculators_common.formats.compact.format import from_compact
from dspark_jax.speculators_common.formats.deepspec.gemma4_writer import to_deepspec_gemma4
from dspark_jax.speculators_common.formats.deepspec.reader import from_deepspec
from dspark_jax.speculators_common.formats.deepspec.writer import to_deepspec
from dspark_jax.speculators_common.formats.draft_config import DraftConfig, DraftOverrides, LayerMask
from dspark_jax.speculators_common.formats.rope.config import RopeConfig
from dspark_jax.speculators_common.formats.speculators.writer import to_speculators
from dspark_jax.speculators_common.formats.zlab.writer import to_zlab
from tests.support.draft_configs import DATA, ROPES, deepspec, gemma4, raw, speculators
from tests.support.written_configs import CAUSAL_FULL, FULL, NON_CAUSAL, SLIDING, refusal


def test_a_draft_made_in_a_program_without_a_length_is_in_no_format() -> None:
    """The published constructor allows it, but no reader accepts null."""
    for write, config in ((to_speculators, speculators()), (to_deepspec, deepspec()), (to_deepspec_gemma4, gemma4())):
        said = refusal(write, dataclasses.replace(config, max_position_embeddings=None))
        assert said.endswith("max_position_embeddings: found None, allowed an integer >= 1, as every file states it")


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
