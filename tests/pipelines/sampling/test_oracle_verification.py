"""Rejection sampling against recorded cases of DeepSpec (set G): accepted drafts, and the distribution of the next
token. The uniforms are recorded too.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.architectures.proposal import Proposal
from dspark_jax.pipelines.sampling.controls import neutral_controls
from dspark_jax.pipelines.sampling.draws import Uniforms, row_sums
from dspark_jax.pipelines.sampling.filters import token_weights
from dspark_jax.pipelines.speculative import acceptance
from tests.support.recorded_tensors import load_recorded

CASES = tuple(f"c{number}" for number in range(8))
_token_weights = jax.jit(token_weights)
FIELDS = (
    "temperature",
    "target_logits",
    "draft_logits",
    "draft_tokens",
    "uniforms",
    "stop_token_ids",
    "accepted",
    "effective_proposal_length",
    "terminated_by_stop",
    "next_token_probs",
)
NO_TOKEN, MOST_DRAFTS = -1, 5


class RecordedUniforms(Uniforms):
    """The recorded numbers for acceptance; those of choices are not recorded."""

    def __init__(self, numbers: Any) -> None:
        self._numbers = numbers

    def one(self, purpose: Any) -> Any:
        del purpose
        return self._numbers

    def pair(self, purpose: Any) -> Any:
        del purpose
        return jnp.stack([self._numbers, self._numbers], axis=1)


@pytest.fixture(scope="module")
def recorded(data_dir: Path) -> dict[str, np.ndarray]:
    return load_recorded(data_dir / "G_verification" / "cases")


def _weights(logits: np.ndarray, temperature: float) -> Any:
    heat = jnp.full((len(logits),), temperature, jnp.float32)
    return _token_weights(jnp.asarray(logits), dataclasses.replace(neutral_controls(len(logits), 1), temperature=heat))


@jax.jit
def _accept(proposal: Proposal, logits: Any, target: acceptance.TargetChoices, numbers: Any) -> tuple[Any, Any]:
    """The verdict, and the weights of the residual that it has drawn from."""
    taken: list[Any] = []
    right = acceptance.residual_weights

    def residual_weights(p: Any, q: Any) -> Any:
        taken.append(right(p, q)[0])
        return right(p, q)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(acceptance, "residual_weights", residual_weights)
        uniforms = RecordedUniforms(numbers)
        verdict = acceptance.accept_sampled(proposal, acceptance.VerifyLogits(**logits), target, uniforms, None)
    return verdict, taken[0]


def _padded(values: np.ndarray, length: int) -> np.ndarray:
    """One shape for all cases: what is beyond a proposal's length does not count."""
    return np.concatenate([values, np.zeros((length - len(values), *values.shape[1:]), values.dtype)])


@pytest.mark.parametrize("case", CASES)
def test_a_recorded_verification_is_reproduced(recorded: dict[str, np.ndarray], case: str) -> None:
    field = {name: recorded[f"{case}.{name}"] for name in FIELDS}
    drafts, temperature = field["draft_tokens"], float(field["temperature"][0])
    rows = MOST_DRAFTS + 1
    weights = _weights(_padded(field["target_logits"], rows), temperature)
    of_drafts = np.asarray(_weights(_padded(field["draft_logits"], MOST_DRAFTS), temperature))
    tokens, q = _padded(drafts, MOST_DRAFTS)[None], (of_drafts / of_drafts.sum(axis=1, keepdims=True))[None]
    index = jnp.arange(rows, dtype=jnp.int32)[None]
    logits = {
        "flat": weights,
        "index": index,
        "rows": jnp.zeros((rows,), jnp.int32),
        "positions": jnp.arange(rows, dtype=jnp.int32),
    }
    target = acceptance.TargetChoices(
        jnp.argmax(weights, axis=1).astype(jnp.int32), jnp.full((rows,), temperature > 0), weights, row_sums(weights)
    )
    numbers = jnp.asarray(_padded(field["uniforms"], rows))
    proposal = Proposal(
        jnp.asarray(tokens),
        jnp.asarray([len(drafts)], jnp.int32),
        jnp.asarray(q),
        jnp.asarray(np.take_along_axis(q[0], tokens[0][:, None], axis=1)[None, :, 0]),
    )
    verdict, used = _accept(proposal, logits, target, numbers)
    stop_ids = field["stop_token_ids"].tolist()
    emission = acceptance.cut_emission(
        proposal.tokens,
        verdict,
        jnp.asarray([[*stop_ids, NO_TOKEN][:1]], jnp.int32),
        jnp.asarray([rows], jnp.int32),
        NO_TOKEN,
    )
    accepted = int(verdict.accepted[0])
    ended = bool(emission.stopped[0]) and int(emission.num_tokens[0]) <= accepted
    assert ended == bool(field["terminated_by_stop"][0])
    cut = int(emission.num_tokens[0])
    assert (cut if ended else accepted) == int(field["accepted"][0])
    assert (cut if ended else len(drafts)) == int(field["effective_proposal_length"][0])
    if not temperature:  # DeepSpec's distribution has one token then
        assert field["next_token_probs"].argmax() == int(verdict.next_token[0])
        assert field["next_token_probs"].max() == 1
        return
    # After an accepted stop token DeepSpec still computes a distribution, as if the draft after it were rejected.
    end = cut if ended else accepted
    left = weights[end] / target.total[end]
    if end < len(drafts):
        assert proposal.probabilities is not None
        left = acceptance.residual_weights(left[None], proposal.probabilities[:, end])[0]
    np.testing.assert_allclose(left / left.sum(), field["next_token_probs"], atol=5e-6)
    if not ended and accepted < len(drafts):  # the weights from which the rule itself has drawn
        np.testing.assert_allclose(used, left, atol=1e-7)
