"""Planted pairs: every draft is accepted when layout, taps, masks and context are right, and none when one of them is
wrong.

Each planted row is in a batch of three, with an unused row. The text must be that of the target in all cases.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.pipelines.speculative.engine import Engine, EngineOptions
from tests.support.planted import (
    BAD,
    BLOCK,
    CYCLE,
    GOOD,
    NUMBER,
    VOCAB,
    DraftPlant,
    Layout,
    cycle_from,
    layer_mark,
    planted_pair,
    planted_target,
    scripted_rounds,
    spoiled,
    successor,
)
from tests.support.requests import request_for
from tests.support.rounds import Rounds, accepted, emitted

ROW, NUM_ROWS = 1, 3
NUM_DRAFTS: dict[Layout, int] = {"anchor-first": BLOCK, "fill-in": BLOCK - 1}
LAYOUTS: tuple[Layout, ...] = ("anchor-first", "fill-in")

KNOWS_ALL = DraftPlant()  # PD-1
POISONED_SLOT_0 = DraftPlant(layout="fill-in", slot0=lambda token: successor(successor(token)))  # PD-2
NEEDS_SLOT_0 = DraftPlant(slot0=successor, markov=spoiled(range(0, 24, BLOCK + 1)))  # PD-3
LEAK_DETECTOR = DraftPlant(bad=[BAD])  # PD-5
GAP_DETECTOR = DraftPlant(needs_good=True, good=[GOOD])  # PD-6

pytestmark = pytest.mark.usefixtures("quick_compilation")


def _rounds(plant: DraftPlant, forced: Layout | None = None) -> Rounds:
    return Rounds(*planted_pair(plant, forced=forced), num_rows=NUM_ROWS)


def _accepted(rounds: Rounds, prompt: tuple[int, ...], *, count: int = 5) -> list[int]:
    """Accepted drafts of the first `count` rounds after `prompt`. The text is checked as well."""
    first = rounds.start(ROW, prompt)
    assert first == successor(prompt[-1])
    return _accepted_from(rounds, first, count=count)


def _accepted_from(rounds: Rounds, anchor: int, *, count: int) -> list[int]:
    outputs = [rounds.step() for _ in range(count)]
    text = emitted(outputs, ROW)
    assert text == list(cycle_from(NUMBER[anchor] + 1, len(text)))
    return accepted(outputs, ROW)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_markov_head_that_knows_the_target_is_accepted_in_full(layout: Layout) -> None:
    rounds = _rounds(dataclasses.replace(KNOWS_ALL, layout=layout))
    assert _accepted(rounds, cycle_from(3, 3)) == [NUM_DRAFTS[layout]] * 5


def test_an_adversarial_draft_is_never_accepted_and_changes_nothing() -> None:
    rounds = _rounds(DraftPlant(markov=lambda token: successor(successor(token))))
    assert _accepted(rounds, cycle_from(3, 3), count=8) == [0] * 8


def test_a_fill_in_draft_is_accepted_in_full_and_not_at_all_as_anchor_first() -> None:
    assert _accepted(_rounds(POISONED_SLOT_0), cycle_from(5, 2)) == [NUM_DRAFTS["fill-in"]] * 5
    assert _accepted(_rounds(POISONED_SLOT_0, forced="anchor-first"), cycle_from(5, 2)) == [0] * 5


def test_an_anchor_first_draft_is_accepted_in_full_and_not_in_round_1_as_fill_in() -> None:
    prompt = cycle_from(22, 2)  # the first anchor has number 0
    assert _accepted(_rounds(NEEDS_SLOT_0), prompt) == [NUM_DRAFTS["anchor-first"]] * 5
    assert _accepted(_rounds(NEEDS_SLOT_0, forced="fill-in"), prompt)[0] == 0


def test_the_engine_reports_a_full_acceptance_as_tau() -> None:
    options = EngineOptions(batch_size=1, max_seq_len=64, page_size=16, prefill_chunks=(8,), rounds_per_call=8)
    request = request_for(prompt_ids=cycle_from(22, 2), max_new_tokens=31)
    completion = Engine(*planted_pair(NEEDS_SLOT_0), options).generate([request])[0]
    assert completion.output_ids == list(cycle_from(0, 31))
    assert completion.tau == BLOCK + 1


def test_in_bfloat16_the_text_is_the_target_s_with_and_without_the_draft() -> None:
    """The target's logits are far apart, so rounding cannot change the text; this tests caches and tables in their
    bfloat16 form.
    """
    plant = DraftPlant(markov=spoiled({2, 9, 17}), needs_good=True, good=[GOOD], bad=[BAD])
    target, draft = planted_pair(plant, dtype=jnp.bfloat16)
    options = EngineOptions(batch_size=1, max_seq_len=64, page_size=16, prefill_chunks=(8,), rounds_per_call=8)
    request = request_for(prompt_ids=(*cycle_from(10, 9), GOOD, CYCLE[23]), max_new_tokens=31)
    plain, speculative = (Engine(target, one, options).generate([request])[0] for one in (None, draft))
    assert plain.output_ids == speculative.output_ids == list(cycle_from(0, 31))
    assert [count for _, count in speculative.rounds] == scripted_rounds(
        plant.markov, CYCLE[0], BLOCK, len(speculative.rounds)
    )
    assert {count for _, count in speculative.rounds} >= {2, BLOCK}


def test_a_pruned_vocabulary_conditions_on_target_ids() -> None:
    """Every draft id differs from its target id. Tokens outside the draft vocabulary end a run of accepted drafts."""
    missing = (CYCLE[4], CYCLE[11])
    ids = tuple(token for token in range(1, 27) if token not in missing)
    rounds = _rounds(DraftPlant(draft_ids=ids))
    assert all(draft != token for draft, token in enumerate(ids))
    expected = scripted_rounds(
        lambda token: -1 if successor(token) in missing else successor(token), CYCLE[0], BLOCK, 5
    )
    assert _accepted(rounds, cycle_from(22, 2)) == expected
    assert min(expected) < BLOCK == max(expected)


def test_padding_ids_of_the_draft_vocabulary_are_never_proposed() -> None:
    """The head gives padding ids the highest logits. A proposal of one could not be accepted."""
    rounds = _rounds(DraftPlant(padded_ids=5))
    assert _accepted(rounds, cycle_from(3, 3)) == [BLOCK] * 5


def test_a_draft_of_any_token_can_be_accepted() -> None:
    """A target that repeats its last token, and a draft that does the same: no id is special, including 0 and the mask
    id.
    """
    rounds = Rounds(
        *planted_pair(DraftPlant(markov=lambda token: token), target=planted_target(lambda token: token)),
        num_rows=NUM_ROWS,
    )
    for token in range(VOCAB):
        first = rounds.start(ROW, (token,))
        outputs = [rounds.step() for _ in range(2)]
        assert [first, *emitted(outputs, ROW)] == [token] * (1 + 2 * (BLOCK + 1))


def test_a_row_whose_draft_overflows_is_not_drafted_in_that_round_and_its_neighbours_are() -> None:
    """The features of a marked row are infinite, those of other rows are not. The row is reported, and nothing infinite
    is stored.
    """
    plant = dataclasses.replace(KNOWS_ALL, tap=1, bad=[BAD, layer_mark(0)], feature_scale=3e38)
    rounds = Rounds(*planted_pair(plant, target=planted_target(num_layers=2)), num_rows=NUM_ROWS)
    prompts = {0: cycle_from(3, 3), ROW: (BAD, *cycle_from(3, 2)), 2: cycle_from(8, 5)}
    for row in prompts:
        rounds.admit(row)
    outputs = [rounds.feed(prompts), *(rounds.step() for _ in range(3))]
    for row, prompt in prompts.items():
        text = emitted(outputs, row)
        assert text == list(cycle_from(NUMBER[prompt[-1]] + 1, len(text)))
        assert [bool(output.non_finite[row]) for output in outputs] == [row == ROW, False, False, False]
        assert [int(output.proposed[row]) for output in outputs[1:]] == [0 if row == ROW else BLOCK, BLOCK, BLOCK]
    for pool in jax.tree.leaves(rounds.state.draft_pages):
        assert bool(jnp.isfinite(pool).all())


class TestRowsThatMustNotBeSeen:
    """PD-5: if one marked row is visible, every draft is wrong."""

    def test_the_detector_goes_off_for_a_mark_in_sight(self) -> None:
        rounds = _rounds(LEAK_DETECTOR)
        assert _accepted(rounds, cycle_from(3, 3)) == [BLOCK] * 5
        assert _accepted(rounds, (CYCLE[3], BAD, CYCLE[4])) == [0] * 5
        assert _accepted(rounds, (CYCLE[3], CYCLE[4], BAD)) == [0] * 5

    def test_rejected_drafts_leave_no_row_behind(self) -> None:
        """The draft sometimes proposes the marked token itself, so the marked rows are those of rejected drafts."""
        plant = dataclasses.replace(LEAK_DETECTOR, markov=spoiled(range(0, 24, 5), wrong=BAD))
        expected = scripted_rounds(plant.markov, CYCLE[0], BLOCK, 8)
        assert _accepted(_rounds(plant), cycle_from(22, 2), count=8) == expected
        assert set(expected) == {0, 3, 4}

    def test_padding_of_a_prompt_chunk_is_not_stored(self) -> None:
        rounds = _rounds(LEAK_DETECTOR)
        rounds.admit(ROW)
        first = rounds.prefill({ROW: cycle_from(3, 11)}, padding_id=BAD)
        assert _accepted_from(rounds, first[ROW], count=3) == [BLOCK] * 3

    def test_a_neighbour_s_marks_are_not_seen(self) -> None:
        rounds = _rounds(LEAK_DETECTOR)
        rounds.start(0, (BAD, CYCLE[1]))
        rounds.start(2, (CYCLE[1], BAD, CYCLE[2]))
        assert _accepted(rounds, cycle_from(3, 3)) == [BLOCK] * 5

    def test_a_row_that_is_used_again_does_not_see_its_former_request(self) -> None:
        rounds = _rounds(LEAK_DETECTOR)
        assert _accepted(rounds, (*cycle_from(3, 9), BAD, CYCLE[12])) == [0] * 5
        assert _accepted(rounds, cycle_from(3, 3)) == [BLOCK] * 5

    def test_pages_of_another_request_do_not_show(self) -> None:
        rounds = _rounds(LEAK_DETECTOR)
        pages = range(NUM_ROWS * rounds.pages_per_row)
        rounds.start(ROW, (*cycle_from(3, 9), BAD, CYCLE[12]), pages=pages[: rounds.pages_per_row])
        first = rounds.start(ROW, cycle_from(3, 3), pages=pages[rounds.pages_per_row - 1 :: -1])
        assert _accepted_from(rounds, first, count=4) == [BLOCK] * 4

    def test_rows_from_the_committed_length_on_are_not_seen(self) -> None:
        """Only the committed length hides the stored rows here."""
        rounds = _rounds(LEAK_DETECTOR)
        rounds.start(ROW, (CYCLE[3], BAD, BAD, BAD))
        committed, anchor = rounds.rows.committed.at[ROW].set(1), rounds.rows.anchor.at[ROW].set(CYCLE[4])
        proposal = rounds.rows.proposal._replace(length=jnp.zeros(NUM_ROWS, jnp.int32))
        rounds.change_rows(committed=committed, anchor=anchor, proposal=proposal)
        assert _accepted_from(rounds, CYCLE[4], count=3) == [0, BLOCK, BLOCK]

    def test_a_window_ends_where_the_anchor_says(self) -> None:
        """The window of 6 counts from the anchor: a mark at distance 6 is visible, at distance 7 it is not."""
        rounds = _rounds(dataclasses.replace(LEAK_DETECTOR, window=6))
        assert _accepted(rounds, (BAD, *cycle_from(3, 5)), count=1) == [0]
        assert _accepted(rounds, (BAD, *cycle_from(3, 6)), count=4) == [BLOCK] * 4


class TestRowsThatMustBeSeen:
    """PD-6: unless the marked row is visible, every draft is wrong."""

    def test_the_detector_goes_off_without_a_mark_and_when_the_stored_row_is_lost(self) -> None:
        rounds = _rounds(GAP_DETECTOR)
        assert _accepted(rounds, cycle_from(3, 3)) == [0] * 5
        first = rounds.start(ROW, (GOOD, *cycle_from(3, 2)))
        rounds.state = dataclasses.replace(
            rounds.state, draft_pages=jax.tree.map(jnp.zeros_like, rounds.state.draft_pages)
        )
        rounds.change_rows(proposal=rounds.rows.proposal._replace(length=jnp.zeros(NUM_ROWS, jnp.int32)))
        assert _accepted_from(rounds, first, count=3) == [0] * 3

    def test_every_prompt_row_is_in_the_context(self) -> None:
        """Including the rows of the chunk before the last one, and of the last prompt token."""
        rounds = _rounds(GAP_DETECTOR)
        for place in range(10):
            prompt = [*cycle_from(3, 10)]
            prompt[place] = GOOD
            assert _accepted(rounds, tuple(prompt), count=2) == [BLOCK] * 2, place

    def test_every_generated_row_is_in_the_context(self) -> None:
        """No draft is accepted until the marked token is committed; then all are."""
        marked = 8
        rounds = _rounds(DraftPlant(needs_good=True, good=[CYCLE[marked]]))
        # The first anchor has number 3; one token a round brings the anchor to `marked` after 5 rounds, and past it
        # after 6.
        assert _accepted(rounds, cycle_from(1, 2), count=9) == [0] * 6 + [BLOCK] * 3

    def test_accepted_drafts_leave_their_rows(self) -> None:
        """In a window of 6, the prompt's mark carries the first round, a token that it accepted the second one, and
        nothing the third one.
        """
        rounds = _rounds(DraftPlant(needs_good=True, good=[GOOD, CYCLE[10]], window=6))
        prompt = (GOOD, *cycle_from(1, 5))  # the first anchor has number 6 and position 6
        assert _accepted(rounds, prompt, count=3) == [BLOCK, BLOCK, 0]


def test_only_the_tap_that_the_config_names_gives_the_right_features() -> None:
    """Layer 0 adds the mark that is needed, layer 1 the mark that spoils: only the stream between them has the first
    one alone.
    """
    plant = DraftPlant(needs_good=True, good=[layer_mark(0)], bad=[layer_mark(1)], tap=1)
    target, draft = planted_pair(plant, target=planted_target(num_layers=2))
    prompt = cycle_from(3, 3)
    drafts = {}
    for tap in range(3):
        draft.config = dataclasses.replace(draft.config, taps=(tap,))
        rounds = Rounds(target, draft, num_rows=NUM_ROWS)
        rounds.start(ROW, prompt)
        drafts[tap] = tuple(rounds.rows.proposal.tokens[ROW].tolist())
    assert drafts == {0: (BAD,) * BLOCK, 1: cycle_from(7, BLOCK), 2: (BAD,) * BLOCK}
