"""The compact draft against recorded values: two rounds of four rows of different lengths, and all rules of length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.architectures.dspark_compact.model import effective_thresholds
from dspark_jax.speculators_common.heads.confidence_head import confident_length_after_first
from tests.support.compact_oracle import (
    LAYERS,
    ROUNDS,
    ROWS,
    SOFT_CAPS,
    TARGET_LAYERS,
    TOLERANCE,
    WIDTH,
    Case,
    recorded_case,
)
from tests.support.compilation import ordinary_compilation

# name -> (thresholds, minimum confidence, steps), in the recorded order
CASES: dict[str, tuple[list[float] | None, float | None, int]] = {
    "off": (None, None, 5),
    "empty_list": ([], None, 5),
    "zeros": ([0.0] * 5, None, 5),
    "ones": ([1.0] * 5, None, 5),
    "first_only": ([1.0, 0.0, 0.0, 0.0, 0.0], None, 5),
    "rising": ([0.0, 0.3, 0.4, 0.5, 0.6], None, 5),
    "uneven": ([0.9, 0.5, 0.1, 0.7, 0.2], None, 5),
    "min_conf": (None, 0.5, 5),
    "short_list": ([0.0, 0.35], None, 5),
    "short_list_min_conf": ([0.0, 0.35], 0.6, 5),
    "list_beats_min_conf": ([0.0, 0.2, 0.2, 0.2, 0.2], 0.95, 5),
    "fewer_steps": ([0.0, 0.3, 0.4, 0.5, 0.6], None, 3),
}

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module", params=list(SOFT_CAPS))
def case(request: pytest.FixtureRequest, data_dir: Path) -> Case:
    return recorded_case(data_dir / "H_compact" / request.param)


def test_the_files_say_what_the_draft_is(case: Case) -> None:
    config = case.draft.config
    assert config.taps == (3, 5, "final")
    assert config.markov_head_type == ("tanh_rnn" if case.name == "rnn" else "vanilla")
    assert (
        config.max_drafts,
        config.num_hidden_layers,
        config.head_dim,
        config.rope.rotary_dim,
        config.mask_token_id,
    ) == (5, 2, 8, 0, None)
    assert (config.thresholds is None) == (case.name != "markov_sts")


def test_taps_are_the_recorded_states_that_the_config_names(case: Case) -> None:
    """Tap j is the recorded hidden state j of the target, and `"final"` is the last one, after the final norm."""
    for index in range(ROUNDS):
        for row in range(ROWS):
            states = case.row(index, row, "target_hidden_all")
            assert len(states) == TARGET_LAYERS + 1
            wanted = np.concatenate([states[-1 if tap == "final" else tap] for tap in case.draft.config.taps], axis=-1)
            np.testing.assert_array_equal(case.row(index, row, "context_taps"), wanted)


def test_context_features_are_the_recorded_ones(case: Case) -> None:
    case.assert_rows_close("context_feature")


def test_the_cache_holds_the_recorded_context_over_both_rounds(case: Case) -> None:
    for layer in range(LAYERS):
        case.assert_rows_close(f"layer{layer}.k_ctx")
        case.assert_rows_close(f"layer{layer}.v_ctx")


def test_the_block_is_embedded_and_run_as_recorded(case: Case) -> None:
    case.assert_rows_close("block_input")
    for layer in range(LAYERS):
        for name in ("k_block", "v_block", "out"):
            case.assert_rows_close(f"layer{layer}.{name}")
    case.assert_rows_close("block_hidden")


def test_logits_are_the_recorded_ones_before_and_after_the_sequence_head(case: Case) -> None:
    case.assert_rows_close("base_logits")
    case.assert_rows_close("corrected_logits")


@pytest.mark.parametrize("name", ["markov", "rnn"])
def test_the_round_that_a_user_runs_gives_the_recorded_values(name: str, data_dir: Path) -> None:
    """With XLA's ordinary optimisation. The other tests use a level that compiles faster."""
    with ordinary_compilation():
        ordinary = recorded_case(data_dir / "H_compact" / name)
    for value in ("layer1.k_ctx", "layer1.out", "base_logits", "corrected_logits", "confidence_logits"):
        ordinary.assert_rows_close(value)
    for index in range(ROUNDS):
        wanted = [ordinary.row(index, row, "sampled_tokens").tolist() for row in range(ROWS)]
        assert ordinary.rounds[index]["sampled_tokens"].tolist() == wanted


def test_greedy_drafts_are_exactly_the_recorded_ones(case: Case) -> None:
    for index in range(ROUNDS):
        wanted = [case.row(index, row, "sampled_tokens").tolist() for row in range(ROWS)]
        assert case.rounds[index]["sampled_tokens"].tolist() == wanted


def test_confidences_are_the_recorded_ones(case: Case) -> None:
    case.assert_rows_close("confidence_logits")
    case.assert_rows_close("confidence")


def test_every_pruning_rule_keeps_the_recorded_number_of_drafts(case: Case) -> None:
    cases = {**CASES, "stored_sts": ([0.0, 0.15, 0.6, 0.3, 0.7], None, 5)} if case.name == "markov_sts" else CASES
    recorded = list(zip(case.expected["prune.thresholds"], case.expected["prune.steps"], strict=True))
    assert len(recorded) == len(cases)
    for number, (thresholds, min_confidence, steps) in enumerate(cases.values()):
        np.testing.assert_array_equal(effective_thresholds(thresholds, min_confidence, WIDTH), recorded[number][0])
        assert steps == recorded[number][1]
    for index in range(ROUNDS):
        for number, (name, (_, _, steps)) in enumerate(cases.items()):
            limits = jnp.broadcast_to(jnp.asarray(recorded[number][0][:steps])[None], (ROWS, steps))
            lengths = confident_length_after_first(case.rounds[index]["confidence_logits"][:, :steps], limits)
            assert lengths.tolist() == case.expected[f"r{index}.proposal_length"][number].tolist(), name


@pytest.mark.parametrize("name", ["off", "short_list_min_conf", "fewer_steps"])
def test_rows_are_drafted_under_the_options_of_the_call(case: Case, name: str) -> None:
    thresholds, min_confidence, steps = CASES[name]
    rows = _rows(case, 1, thresholds=thresholds, min_confidence=min_confidence, num_steps=steps)
    assert rows.lengths.tolist() == case.expected["r1.proposal_length"][list(CASES).index(name)].tolist()
    assert rows.tokens.tolist() == case.rounds[1]["sampled_tokens"][:, :steps].tolist()


def test_without_options_the_stored_thresholds_decide(case: Case) -> None:
    by_default = len(CASES) if case.name == "markov_sts" else 0
    for index in range(ROUNDS):
        wanted = case.expected[f"r{index}.proposal_length"][by_default].tolist()
        assert _rows(case, index).lengths.tolist() == wanted
        no_wish = jnp.zeros((ROWS,), jnp.float32)
        assert case.draft.proposal_length(case.rounds[index]["confidence_logits"], no_wish).tolist() == wanted


def test_the_threshold_of_a_request_holds_for_its_row_alone(case: Case) -> None:
    """The thresholds of the four rows: 0.5 as recorded, all drafts, those stored with the draft, slot 0 only."""
    recorded = case.expected["r0.proposal_length"]
    by_default, minimum = len(CASES) if case.name == "markov_sts" else 0, list(CASES).index("min_conf")
    lengths = case.draft.proposal_length(
        case.rounds[0]["confidence_logits"], jnp.asarray([0.5, 1e-9, 0.0, 1.0], jnp.float32)
    )
    assert lengths.tolist() == [recorded[minimum, 0], WIDTH, recorded[by_default, 2], 1]


def test_dense_rows_give_what_the_paged_cache_gives(case: Case) -> None:
    for index in range(ROUNDS):
        rows = _rows(case, index)
        for row in range(ROWS):
            np.testing.assert_allclose(
                rows.base_logits[row], case.row(index, row, "base_logits"), rtol=0, atol=TOLERANCE
            )
            np.testing.assert_allclose(
                rows.confidences[row], case.row(index, row, "confidence"), rtol=0, atol=TOLERANCE
            )


def test_a_row_does_not_depend_on_its_neighbours_nor_on_the_order_of_its_context(case: Case) -> None:
    taps = case.expected["r0.row1.context_taps"]
    shuffled = jnp.asarray(np.random.default_rng(1).permutation(taps)[None])
    alone = case.draft.forward_rows(
        case.draft.project_context_rows(shuffled),
        jnp.asarray([12], jnp.int32),
        jnp.asarray(case.expected["r0.anchors"][1:2]),
        case.tables,
    )
    assert alone.tokens[0].tolist() == case.row(0, 1, "sampled_tokens").tolist()
    np.testing.assert_allclose(alone.base_logits[0], case.row(0, 1, "base_logits"), rtol=0, atol=TOLERANCE)


def _rows(case: Case, index: int, **options: Any) -> Any:
    """`forward_rows` over the whole context of every row, padded with values that must not be seen."""
    lengths = case.expected[f"r{index}.context_lengths"]
    lines = np.full((ROWS, lengths.max(), 3 * 64), 7, np.float32)
    for row, length in enumerate(lengths):
        lines[row, :length] = np.concatenate([case.row(earlier, row, "context_taps") for earlier in range(index + 1)])
    context_kv = case.draft.project_context_rows(jnp.asarray(lines))
    return case.draft.forward_rows(
        context_kv, jnp.asarray(lengths), jnp.asarray(case.expected[f"r{index}.anchors"]), case.tables, **options
    )
