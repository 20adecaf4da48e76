"""A row's results depend on its own text alone: not on other rows, its slot, its pages, the chunks of its prompt, or k.

A random target with a draft that is sometimes accepted; the state is compared between rounds.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.architectures.nn.attention.kv_cache import KVCache, KVPages
from tests.support.random_pairs import (
    BLOCK,
    bigram_draft,
    frequent_successors,
    plain_greedy,
    random_prompts,
    random_target,
)
from tests.support.rounds import Rounds, accepted, emitted
from tests.support.tiny_checkpoints import load_pair

WIDTH, NUM_ROWS, NUM_ROUNDS, NEW_TOKENS = 7, 5, 8, 24
PROMPTS = tuple(random_prompts(12, seed=5))
RAGGED = tuple(next(prompt for prompt in PROMPTS if len(prompt) == length) for length in (1, 12, 4, 9, WIDTH))
ROUNDING = 2e-5

pytestmark = pytest.mark.usefixtures("quick_compilation")


@functools.cache
def _pair() -> tuple[Any, Any]:
    texts = [(prompt[-1], *text) for prompt, text in zip(PROMPTS, plain_greedy(PROMPTS, NEW_TOKENS), strict=True)]
    return load_pair(random_target(), bigram_draft(frequent_successors(texts)))


def _batch(*, num_rows: int = NUM_ROWS, width: int = WIDTH) -> Rounds:
    return Rounds(*_pair(), num_rows=num_rows, width=width)


def _started(prompts: dict[int, tuple[int, ...]], **admission: Any) -> tuple[Rounds, dict[int, int]]:
    batch = _batch()
    for row in prompts:
        batch.admit(row, **admission)
    return batch, batch.prefill(prompts)


@functools.cache
def _alone(prompt: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Text and accepted drafts per round of a request in a batch of one."""
    rounds = _batch(num_rows=1)
    first = rounds.start(0, prompt)
    outputs = [rounds.step() for _ in range(NUM_ROUNDS)]
    return [first, *emitted(outputs)], accepted(outputs)


def test_alone_every_request_gets_the_plain_text_and_many_accept_patterns_occur() -> None:
    for prompt in RAGGED:
        wanted = plain_greedy(PROMPTS, NEW_TOKENS)[PROMPTS.index(prompt)]
        text = _alone(prompt)[0]
        assert tuple(text[:NEW_TOKENS]) == wanted[: len(text)]
    assert {count for prompt in RAGGED for count in _alone(prompt)[1]} >= {0, 1, 2, 3}


def test_five_ragged_requests_together_are_as_each_alone() -> None:
    batch, first = _started(dict(enumerate(RAGGED)))
    outputs = [batch.step() for _ in range(NUM_ROUNDS)]
    for row, prompt in enumerate(RAGGED):
        assert ([first[row], *emitted(outputs, row)], accepted(outputs, row)) == _alone(prompt)


def test_the_slot_of_a_request_does_not_matter() -> None:
    batch, first = _started({row: RAGGED[(row + 2) % NUM_ROWS] for row in range(NUM_ROWS)})
    outputs = [batch.step() for _ in range(NUM_ROUNDS)]
    for row in range(NUM_ROWS):
        assert ([first[row], *emitted(outputs, row)], accepted(outputs, row)) == _alone(RAGGED[(row + 2) % NUM_ROWS])


def test_a_used_row_with_used_pages_is_as_a_fresh_one() -> None:
    """INV-46. The second request gets the first one's row, and its pages in reverse order."""
    batch, _ = _started(dict(enumerate(RAGGED)))
    for _ in range(NUM_ROUNDS):
        batch.step()
    first = batch.start(3, RAGGED[0], pages=batch.rows.page_table[3].tolist()[::-1])
    outputs = [batch.step() for _ in range(NUM_ROUNDS)]
    assert ([first, *emitted(outputs, 3)], accepted(outputs, 3)) == _alone(RAGGED[0])


def test_prompts_and_decoding_share_a_step() -> None:
    """Row 2 takes its prompt and row 4 waits for its own, while rows 0 and 1 decode."""
    batch, first = _started({0: RAGGED[0], 1: RAGGED[1]})
    batch.admit(2)
    batch.admit(4)
    prompt = RAGGED[3]
    outputs = [
        batch.feed({2: prompt[:3], 4: ()}, last=()),
        batch.feed({2: (), 4: ()}, last=()),
        batch.feed({2: prompt[3:], 4: ()}, last=(2,)),
        batch.feed({4: RAGGED[2]}),
    ]
    outputs += [batch.step() for _ in range(NUM_ROUNDS - len(outputs))]
    assert not any(output.is_round[2] for output in outputs[:3])
    for row, prompt in ((0, RAGGED[0]), (1, RAGGED[1])):
        assert ([first[row], *emitted(outputs, row)], accepted(outputs, row)) == _alone(prompt)
    for row, prompt in ((2, RAGGED[3]), (4, RAGGED[2])):
        text, rounds = _alone(prompt)
        assert emitted(outputs, row) == text[: len(emitted(outputs, row))]
        assert accepted(outputs, row) == rounds[: len(accepted(outputs, row))]
        assert len(accepted(outputs, row)) >= 3


def test_a_step_with_an_empty_prompt_chunk_is_a_step_without_one() -> None:
    batch, _ = _started(dict(enumerate(RAGGED[:4])))
    twin, _ = _started(dict(enumerate(RAGGED[:4])))
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, batch.step(), twin.step_without_chunk())
    jax.tree.map(np.testing.assert_array_equal, batch.rows, twin.rows)


@pytest.mark.parametrize("width", [1, 3, 16])
def test_prompt_chunks_of_any_size_leave_the_same_context_and_the_same_drafts(width: int) -> None:
    whole, first = _started(dict(enumerate(RAGGED)))
    cut = _batch(width=width)
    for row in range(NUM_ROWS):
        cut.admit(row)
    assert cut.prefill(dict(enumerate(RAGGED))) == first
    np.testing.assert_array_equal(cut.rows.proposal.tokens, whole.rows.proposal.tokens)
    np.testing.assert_array_equal(cut.rows.proposal.length, whole.rows.proposal.length)
    for row in range(NUM_ROWS):
        _assert_same_context(cut, whole, row)


def test_after_every_round_the_caches_equal_a_fresh_run_over_the_committed_text() -> None:
    """INV-39, INV-40: after `a` accepted drafts exactly a + 1 rows were added, those of the committed tokens."""
    batch, first = _started(dict(enumerate(RAGGED)))
    texts = {row: [*prompt, first[row]] for row, prompt in enumerate(RAGGED)}
    patterns = set()
    for _ in range(NUM_ROUNDS):
        output = batch.step()
        for row in texts:
            texts[row] += output.tokens[row, : output.num_tokens[row]].tolist()
            assert int(batch.rows.committed[row]) == len(texts[row]) - 1
            assert int(batch.rows.anchor[row]) == texts[row][-1]
        patterns |= set(output.accepted.tolist())
        fresh, again = _started({row: tuple(text[:-1]) for row, text in texts.items()})
        assert again == {row: text[-1] for row, text in texts.items()}
        np.testing.assert_array_equal(batch.rows.proposal.tokens, fresh.rows.proposal.tokens)
        for row in texts:
            _assert_same_context(batch, fresh, row)
    assert patterns >= {0, 1, 2, 3}


def test_what_lies_beyond_the_committed_length_does_not_matter() -> None:
    """Rows of rejected drafts are overwritten with large values after every round, in both caches. Nothing changes."""
    clean, _ = _started(dict(enumerate(RAGGED)))
    poisoned, _ = _started(dict(enumerate(RAGGED)))
    for _ in range(NUM_ROUNDS):
        poisoned.state = dataclasses.replace(
            poisoned.state,
            target_pages=_poisoned(poisoned, poisoned.state.target_pages),
            draft_pages=_poisoned(poisoned, poisoned.state.draft_pages),
        )
        wanted, found = clean.step(), poisoned.step()
        np.testing.assert_array_equal(found.tokens, wanted.tokens)
        np.testing.assert_array_equal(found.accepted, wanted.accepted)
        np.testing.assert_array_equal(poisoned.rows.proposal.tokens, clean.rows.proposal.tokens)


def test_the_poison_of_the_last_test_is_felt_one_row_earlier() -> None:
    clean, _ = _started(dict(enumerate(RAGGED)))
    poisoned, _ = _started(dict(enumerate(RAGGED)))
    pages = _poisoned(poisoned, poisoned.state.target_pages, reach=1)
    poisoned.state = dataclasses.replace(poisoned.state, target_pages=pages)
    for batch in (poisoned, clean):
        batch.change_rows(proposal=batch.rows.proposal._replace(length=jnp.zeros((NUM_ROWS,), jnp.int32)))
    assert (poisoned.step().tokens[:, 0] != clean.step().tokens[:, 0]).any()


def _poisoned(rounds: Rounds, pages: KVPages | None, *, reach: int = 0) -> KVPages:
    """`pages` with 1e4 in every position from the committed length of its row, less `reach`, on."""
    assert pages is not None
    position = np.arange(rounds.pages_per_row * rounds.page_size).reshape(rounds.pages_per_row, rounds.page_size)
    beyond = position[None] >= np.asarray(rounds.rows.committed)[:, None, None] - reach
    by_page = np.zeros((rounds.num_rows * rounds.pages_per_row, rounds.page_size), bool)
    by_page[np.asarray(rounds.rows.page_table)] = beyond
    poison = jnp.asarray(by_page)[:, None, :, None]
    return jax.tree.map(lambda pool: jnp.where(poison, jnp.asarray(1e4, pool.dtype), pool), pages)


def _assert_same_context(one: Rounds, other: Rounds, row: int) -> None:
    for name in ("target_pages", "draft_pages"):
        pairs = zip(
            one.context(getattr(one.state, name), row), other.context(getattr(other.state, name), row), strict=True
        )
        for found, wanted in pairs:
            np.testing.assert_allclose(found, wanted, rtol=0, atol=ROUNDING, err_msg=f"{name}, row {row}")


def test_the_first_drafts_do_not_depend_on_how_many_are_asked_for() -> None:
    """INV-84: the trained width always runs; only the chain and the last layer's queries are shorter."""
    batch, _ = _started(dict(enumerate(RAGGED)))
    target, draft = _pair()
    graphdef, modules = nnx.split((target, draft))

    def all_lengths(modules: Any, cache: KVCache, anchor: Any) -> list[Any]:
        target, draft = nnx.merge(graphdef, modules)
        drafts = []
        for count in range(1, BLOCK + 1):
            hidden = draft.forward_block(draft.embed_block(anchor, target), cache, count)
            drafts.append(draft.sample_draft_tokens(draft.compute_logits(hidden, target), anchor, hidden=hidden))
        return drafts

    assert batch.state.draft_pages is not None
    cache = KVCache(pages=batch.state.draft_pages, page_table=batch.rows.page_table, lengths=batch.rows.committed)
    by_count = jax.jit(all_lengths)(modules, cache, batch.rows.anchor)
    for count, drafts in enumerate(by_count, start=1):
        np.testing.assert_array_equal(drafts, batch.rows.proposal.tokens[:, :count])


def test_at_threshold_one_nothing_is_proposed_and_the_text_is_the_same() -> None:
    batch, first = _started(dict(enumerate(RAGGED)), threshold=1.0)
    outputs = [batch.step() for _ in range(NUM_ROUNDS)]
    for row, prompt in enumerate(RAGGED):
        assert [int(output.proposed[row]) for output in outputs] == accepted(outputs, row) == [0] * NUM_ROUNDS
        assert [first[row], *emitted(outputs, row)] == _alone(prompt)[0][: NUM_ROUNDS + 1]


def test_thresholds_change_what_is_verified_and_never_the_text() -> None:
    prompts = dict.fromkeys(range(NUM_ROWS), RAGGED[1])
    batch = _batch()
    for row in prompts:
        batch.admit(row, threshold=(0.0, 0.5, 0.65, 0.7, 1.0)[row])
    batch.prefill(prompts)
    outputs = [batch.step() for _ in range(NUM_ROUNDS)]
    proposed = [[int(output.proposed[row]) for output in outputs] for row in prompts]
    assert proposed[0] == [BLOCK] * NUM_ROUNDS
    assert proposed[4] == [0] * NUM_ROUNDS
    assert len({count for row in (1, 2, 3) for count in proposed[row]}) >= 3
    text = emitted(outputs, 0)
    for row in prompts:
        shorter = emitted(outputs, row)
        assert shorter == text[: len(shorter)] or text == shorter[: len(text)]


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("fc.kernel", np.inf),
        ("head.kernel", np.nan),
        ("markov_head.w1", np.nan),
        ("markov_head.w2.kernel", np.nan),
        ("confidence_head.projection.kernel", np.nan),
    ],
)
def test_a_draft_with_numbers_that_are_not_finite_proposes_nothing_and_says_so(parameter: str, value: float) -> None:
    """A few entries of one parameter; the text is that of the target."""
    target, draft = _pair()
    graphdef, state = nnx.split(draft)
    broken = nnx.merge(graphdef, jax.tree.map(jnp.copy, state))
    variable = operator.attrgetter(parameter)(broken)
    variable[...] = variable[...].at[..., :1].set(value)
    batch = Rounds(target, broken, num_rows=NUM_ROWS, width=16)
    for row in range(NUM_ROWS):
        batch.admit(row)
    outputs = [batch.feed(dict(enumerate(RAGGED))), *(batch.step() for _ in range(NUM_ROUNDS))]
    for row, prompt in enumerate(RAGGED):
        assert all(output.non_finite[row] and output.proposed[row] == 0 for output in outputs)
        assert emitted(outputs, row) == _alone(prompt)[0][: NUM_ROUNDS + 1]


def test_an_overflow_in_a_chunk_that_is_not_the_last_is_reported_by_every_later_round() -> None:
    batch = _batch()
    batch.admit(0)
    batch.feed({0: RAGGED[-1][:2]}, last=[])
    pages = batch.state.draft_pages
    batch.state = dataclasses.replace(
        batch.state, draft_pages=jax.tree.map(lambda leaf: leaf.at[0].set(jnp.nan), pages)
    )
    outputs = [batch.feed({0: RAGGED[-1][2:]}), *(batch.step() for _ in range(NUM_ROUNDS))]
    assert all(output.non_finite[0] and output.proposed[0] == 0 for output in outputs)
    assert emitted(outputs, 0) == _alone(RAGGED[-1])[0][: NUM_ROUNDS + 1]
