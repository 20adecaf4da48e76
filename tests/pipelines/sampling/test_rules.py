"""Rules that are not exact do what they say: relaxed acceptance by the target's probabilities, synthetic by a rate."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.architectures.nn.attention.kv_params import KVParams
from dspark_jax.architectures.proposal import Proposal
from dspark_jax.pipelines.sampling.controls import UNUSED_ID
from dspark_jax.pipelines.sampling.policy import Policy
from dspark_jax.pipelines.sampling.rules import Relaxed, Rule, Synthetic, parse_rule
from dspark_jax.pipelines.speculative.acceptance import Verdict, VerifyLogits, decide
from dspark_jax.pipelines.speculative.sizes import EngineOptions, EnginePlan
from dspark_jax.pipelines.speculative.state import RowSizes, empty_rows
from dspark_jax.speculators_common.errors import RequestError
from dspark_jax.speculators_common.numerics.argmax import argmax
from tests.support.bigram_pair import ChainDraft

pytestmark = pytest.mark.usefixtures("quick_compilation")

PROBABILITIES = (0.05, 0.1, 0.2, 0.5, 0.1, 0.05)


def _decided(
    drafts: np.ndarray,
    rule: Rule,
    temperature: float,
    lengths: np.ndarray | None = None,
    *,
    banned: int | None = None,
    masked: int | None = None,
) -> Verdict:
    """The verdict on `drafts [B, k]`, with `PROBABILITIES` at every position; one id may be banned, or masked by a
    grammar.
    """
    count, width = drafts.shape[0], drafts.shape[1] + 1
    sizes = RowSizes(pages_per_row=1, num_pages=1, page_size=16, num_speculative_tokens=drafts.shape[1], num_stop_ids=1)

    @jax.jit
    def run(drafts: Any, lengths: Any) -> Verdict:
        rows = empty_rows(count, sizes)
        seed = jnp.stack([jnp.zeros((count,), jnp.uint32), jnp.arange(count, dtype=jnp.uint32)], axis=1)
        heat = jnp.full((count,), temperature, jnp.float32)
        bias_ids = jnp.full((count, 1), UNUSED_ID if banned is None else banned, jnp.int32)
        controls = dataclasses.replace(
            rows.controls, seed=seed, temperature=heat, bias_ids=bias_ids, bias=jnp.full((count, 1), -jnp.inf)
        )
        rows = dataclasses.replace(rows, controls=controls)
        places = jnp.arange(count * width, dtype=jnp.int32)
        logits = VerifyLogits(
            flat=jnp.broadcast_to(jnp.log(jnp.asarray(PROBABILITIES))[None], (count * width, len(PROBABILITIES))),
            index=places.reshape(count, width),
            rows=places // width,
            positions=1 + places % width,
        )
        policy = Policy(samples=temperature > 0, edits=banned is not None, masks=masked is not None)
        words = jnp.full((count, width, 1), 0xFFFFFFFF if masked is None else 0xFFFFFFFF - (1 << masked), jnp.uint32)
        return decide(
            Proposal(drafts, lengths), logits, rows, policy, lambda flat: argmax(flat, "plain"), None, rule, words
        )

    lengths = np.full((count,), width - 1) if lengths is None else lengths
    return run(jnp.asarray(drafts, jnp.int32), jnp.asarray(lengths, jnp.int32))


def test_relaxed_acceptance_takes_probable_drafts_and_no_others() -> None:
    """Among the three most probable, and at most 0.6 less probable than the first."""
    verdict = _decided(np.asarray([[2], [4], [3], [0]]), Relaxed(3, 0.6), 1.0)
    assert verdict.accepted.tolist() == [1, 0, 1, 0]  # 1 is as probable as 4, and comes first
    assert verdict.next_token[1:].tolist()[::2] == [3, 3]
    assert _decided(np.asarray([[1], [4]]), Relaxed(4, 0.6), 1.0).accepted.tolist() == [1, 1]
    assert _decided(np.asarray([[2], [4], [3], [0]]), Relaxed(2, 0.6), 1.0).accepted.tolist() == [1, 0, 1, 0]
    assert _decided(np.asarray([[2], [4], [3], [0]]), Relaxed(6, 0.31), 1.0).accepted.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("kept_from", [{"banned": 2}, {"masked": 2}], ids=["banned", "not in the grammar"])
def test_relaxed_acceptance_takes_no_draft_that_the_options_forbid(kept_from: dict[str, Any]) -> None:
    """Even where every token is near enough."""
    verdict = _decided(np.asarray([[2], [1]]), Relaxed(6, 1.0), 1.0, **kept_from)
    assert verdict.accepted.tolist() == [0, 1]
    assert verdict.next_token.tolist()[0] == 3


def test_greedy_rows_stay_exact_under_relaxed_acceptance() -> None:
    verdict = _decided(np.asarray([[2, 3], [3, 3]]), Relaxed(), 0.0)
    assert verdict.accepted.tolist() == [0, 2]
    assert verdict.next_token.tolist() == [3, 3]


@pytest.mark.parametrize(
    ("drafts", "values"),
    [(7, {0.2: 0.589, 0.4: 0.769, 0.6: 0.872, 0.8: 0.944}), (3, {0.2: 0.389, 0.4: 0.607, 0.6: 0.766, 0.8: 0.893})],
)
def test_the_probability_of_a_synthetic_rate_is_that_of_other_systems(drafts: int, values: dict[float, float]) -> None:
    for rate, probability in values.items():
        assert Synthetic(rate).probability(drafts) == pytest.approx(probability, abs=1e-3)
    assert [Synthetic(rate).probability(drafts) for rate in (0.0, 1.0)] == [0, 1]


@pytest.mark.parametrize("temperature", [0.0, pytest.param(1.0, marks=pytest.mark.thorough)])
def test_synthetic_acceptance_accepts_at_its_rate_whatever_the_lengths(temperature: float) -> None:
    lengths = np.arange(20_000) % 4
    drafts = np.zeros((len(lengths), 3), np.int32)
    accepted = np.asarray(_decided(drafts, Synthetic(0.6), temperature, lengths).accepted)
    for length in (1, 2, 3):
        found = accepted[lengths == length].mean() / length
        assert found == pytest.approx(0.6, abs=0.03)
    assert not accepted[lengths == 0].any()


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("exact", None),
        ("relaxed", Relaxed(10, 0.6)),
        ("relaxed:3,0.25", Relaxed(3, 0.25)),
        ("synthetic:0.7", Synthetic(0.7)),
    ],
)
def test_a_rule_is_read_from_text(text: str, rule: Rule | None) -> None:
    assert parse_rule(text) == rule


@pytest.mark.parametrize(
    "text",
    [
        "",
        "greedy",
        "relaxed:",
        "relaxed:0,0.5",
        "relaxed:2.5,0.5",
        "relaxed:3,nan",
        "relaxed:1e999,0",
        "synthetic",
        "synthetic:1.5",
        "synthetic:x",
    ],
)
def test_a_text_that_names_no_rule_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="acceptance"):
        parse_rule(text)


@pytest.mark.parametrize(
    ("options", "with_draft", "allowed"),
    [
        ({"acceptance": Relaxed()}, False, "only with a draft"),
        ({"acceptance": Relaxed(), "proposal": "sampled"}, True, "exact, with sampled drafts"),
        ({"acceptance": Synthetic(0.5), "proposal": "sampled"}, True, "exact, with sampled drafts"),
    ],
)
def test_rules_that_cannot_be_combined_are_refused(options: dict[str, Any], with_draft: bool, allowed: str) -> None:
    draft = ChainDraft("none", pruned=False, sample_from_anchor=True) if with_draft else None
    params = KVParams(num_layers=1, num_key_value_heads=1, head_dim=1)
    with pytest.raises(RequestError, match=allowed):
        EnginePlan.of(
            EngineOptions(**options), vocab_size=6, target_params=params, draft=None if draft is None else draft.config
        )
