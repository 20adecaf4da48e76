"""Filters and draws one by one: against sorted vocabularies, with ties, and with rows that have nothing to choose."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.architectures.proposal import Proposal
from dspark_jax.pipelines.sampling.controls import Controls, request_controls
from dspark_jax.pipelines.sampling.draws import Purpose, Uniforms, weighted_choice
from dspark_jax.pipelines.sampling.filters import token_weights
from dspark_jax.pipelines.sampling.generation import Generation
from dspark_jax.pipelines.sampling.policy import Policy
from dspark_jax.pipelines.speculative.acceptance import Verdict, VerifyLogits, decide
from dspark_jax.pipelines.speculative.state import RowSizes, empty_rows
from dspark_jax.speculators_common.numerics.argmax import argmax
from tests.support.sampled_twin import filtered

VOCAB, NUM_BIASED_IDS = 203, 3  # not a multiple of the number of groups
OPTIONS = [
    Generation(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature in (0.3, 1.0, 2.0)
    for top_k in (0, 1, 7, VOCAB + 5)
    for top_p in (1.0, 1e-6, 0.5, 0.999)
    for min_p in (0.0, 0.1, 1.0)
]

pytestmark = pytest.mark.usefixtures("quick_compilation")


def _controls(options: list[Generation], seed: int = 0) -> Controls:
    words = np.asarray([seed, 0], np.uint32)
    rows: Controls = jax.tree.map(
        lambda *leaves: jnp.asarray(np.concatenate(leaves)),
        *[request_controls(one, words, 1, NUM_BIASED_IDS) for one in options],
    )
    return rows


_weights = jax.jit(token_weights)


def test_the_filters_keep_what_a_sort_keeps() -> None:
    logits = np.random.default_rng(0).normal(0, 3, (len(OPTIONS), VOCAB)).astype(np.float32)
    found = np.asarray(_weights(jnp.asarray(logits), _controls(OPTIONS)))
    for row, options in enumerate(OPTIONS):
        expected = filtered(logits[row].astype(np.float64), options)
        assert ((found[row] > 0) == (expected > 0)).all(), options
        np.testing.assert_allclose(found[row] / found[row].sum(), expected, atol=1e-6)


def test_tokens_with_equal_logits_are_kept_or_removed_together() -> None:
    logits = jnp.asarray([[3.0, 2.0, 2.0, 2.0, 1.0]] * 3)
    options = [Generation(temperature=1, top_k=2), Generation(temperature=1, top_p=0.6), Generation(temperature=1)]
    kept = np.asarray(token_weights(logits, _controls(options))) > 0
    assert kept.tolist() == [[True] * 4 + [False], [True] * 4 + [False], [True] * 5]


@pytest.mark.parametrize("size", [5, 64, 203, 49_152])
def test_a_choice_follows_the_weights_and_never_takes_a_weight_of_zero(size: int) -> None:
    random = np.random.default_rng(size)
    weights = np.where(random.random(size) < 0.5, 0, random.random(size)).astype(np.float32)
    weights[:3] = (0, 1e-30, 0)
    numbers = random.random((4096, 2)).astype(np.float32)
    last = 1 - 2**-24
    numbers[:4] = np.asarray([[0, 0], [0, last], [last, 0], [last, last]], np.float32)
    choose = jax.jit(jax.vmap(lambda pair: weighted_choice(jnp.asarray(weights)[None], pair[None])[0]))
    chosen = np.concatenate([choose(jnp.asarray(part)) for part in np.split(numbers, 8)])
    assert (weights[chosen] > 0).all()
    expected = np.zeros(5)
    np.add.at(expected, np.arange(size) % 5, weights / weights.sum() * len(numbers))
    found = np.bincount(chosen % 5, minlength=5)
    assert (np.abs(found - expected) < 5 * np.sqrt(np.maximum(expected, 1))).all()


def test_random_numbers_depend_on_seed_and_position_alone_and_purposes_share_none() -> None:
    seeds, positions = jnp.asarray([[1, 2]] * 3 + [[1, 3]], jnp.uint32), jnp.asarray([5, 6, 5, 5], jnp.int32)
    numbers = Uniforms(seeds, positions)
    choices = [Purpose.TARGET_CHOICE, Purpose.DRAFT_CHOICE, Purpose.RESIDUAL_CHOICE]
    parts = [*map(numbers.pair, choices), numbers.one(Purpose.ACCEPTANCE)[:, None]]
    together = np.concatenate(parts, axis=1)
    np.testing.assert_array_equal(together[0], together[2])
    distinct = np.concatenate([together[0], together[1], together[3]])
    assert len(set(distinct.tolist())) == distinct.size == 21
    alone = Uniforms(seeds[3:], positions[3:])
    np.testing.assert_array_equal(alone.pair(Purpose.TARGET_CHOICE), numbers.pair(Purpose.TARGET_CHOICE)[3:])


def _decided(logits: Any, generation: Generation) -> Verdict:
    """The decision of one row without drafts over these logits."""
    sizes = RowSizes(
        pages_per_row=1,
        num_pages=1,
        page_size=4,
        num_speculative_tokens=0,
        num_stop_ids=1,
        num_biased_ids=NUM_BIASED_IDS,
    )
    rows = dataclasses.replace(empty_rows(1, sizes), controls=_controls([generation]))
    verify = VerifyLogits(
        flat=jnp.asarray(logits, jnp.float32)[None],
        index=jnp.zeros((1, 1), jnp.int32),
        rows=jnp.zeros((1,), jnp.int32),
        positions=jnp.ones((1,), jnp.int32),
    )
    proposal = Proposal(jnp.zeros((1, 0), jnp.int32), jnp.zeros((1,), jnp.int32))
    return decide(proposal, verify, rows, Policy(samples=True, edits=True), lambda flat: argmax(flat, "plain"))


HOT = Generation(temperature=1.0)
INFINITY = float("inf")


@pytest.mark.parametrize(
    ("logits", "generation", "expected"),
    [
        ([-INFINITY, -INFINITY, 1.0, -INFINITY], HOT, 2),
        ([0.0, INFINITY, 1.0, 2.0], HOT, 1),  # an overflow: the largest, not NaN
        ([1e30, 3e38, -3e38, 0.0], HOT, 1),
        ([5.0, 4.0, 3.0, 2.0], dataclasses.replace(HOT, banned_ids=(0, 1, 3)), 2),
        ([5.0, 4.0, -INFINITY, -INFINITY], dataclasses.replace(HOT, banned_ids=(0,), top_k=1), 1),
        ([5.0, 4.0, 3.0, 2.0], dataclasses.replace(HOT, temperature=1e-30), 0),
        ([5.0, 4.0, 3.0, 2.0], dataclasses.replace(HOT, top_p=1e-30, logit_bias=((3, 1e6),)), 3),
    ],
)
def test_a_row_with_little_to_choose_gets_its_best_allowed_token(
    logits: list[float], generation: Generation, expected: int
) -> None:
    assert int(_decided(logits, generation).next_token[0]) == expected
