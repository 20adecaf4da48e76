"""Training of compact drafts against recorded training rows, logits, loss terms and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.architectures import dspark_compact
from dspark_jax.architectures.dspark_compact.weights import parameter_path
from dspark_jax.speculators_common.formats.compact.format import tensor_shapes
from tests.support.compact_oracle import ROWS, SOFT_CAPS, TOLERANCE, WIDTH, Case, recorded_case

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module", params=list(SOFT_CAPS))
def case(request: pytest.FixtureRequest, data_dir: Path) -> Case:
    return recorded_case(data_dir / "H_compact" / request.param)


def _training(case: Case) -> dspark_compact.TrainingRows:
    expected = case.expected
    ends = np.cumsum(expected["train.seq_lens"])
    return dspark_compact.training_rows(
        np.split(expected["train.seq_ids"], ends[:-1]),
        np.split(expected["train.seq_hidden"], ends[:-1]),
        list(zip(expected["train.anchor_seq"].tolist(), expected["train.anchor_pos"].tolist(), strict=True)),
        hidden_size=64,
        block_size=WIDTH,
        max_context=int(expected["train.max_context"][0]),
    )


def test_training_rows_are_the_recorded_ones(case: Case) -> None:
    rows, expected = _training(case), case.expected
    np.testing.assert_array_equal(rows.context_mask, expected["train.context_mask"])
    np.testing.assert_array_equal(
        rows.context_taps[rows.context_mask], expected["train.context_taps"][expected["train.context_mask"]]
    )
    np.testing.assert_array_equal(rows.previous, expected["train.prev_tokens"])
    np.testing.assert_array_equal(rows.labels, expected["train.labels"])
    np.testing.assert_array_equal(rows.target_hidden, expected["train.target_hidden"])


def test_the_context_ends_before_the_anchor(case: Case) -> None:
    """The last context position of every anchor is t - 1.

    The state at t would reveal the label of slot 0. It is in no context.
    """
    rows = _training(case)
    for row in range(ROWS):
        at_anchor = rows.target_hidden[row, 0]
        context = rows.context_taps[row][rows.context_mask[row]]
        assert not (context[:, -64:] == at_anchor).all(axis=1).any()
        sequence, t = int(case.expected["train.anchor_seq"][row]), int(case.expected["train.anchor_pos"][row])
        start = int(case.expected["train.seq_lens"][:sequence].sum())
        np.testing.assert_array_equal(context[-1], case.expected["train.seq_hidden"][start + t - 1])


@pytest.fixture(scope="module")
def trained(case: Case) -> dict[str, Any]:
    """Training forward pass, loss and gradients on the recorded batch, whose padding has arbitrary values."""
    expected = case.expected
    graphdef, params = nnx.split(case.draft, nnx.Param)

    def loss_of(params: Any) -> tuple[Any, Any]:
        draft = nnx.merge(graphdef, params)
        taps, mask = jnp.asarray(expected["train.context_taps"]), jnp.asarray(expected["train.context_mask"])
        rows = case.tables.embed_tokens(jnp.asarray(expected["train.anchor_tokens"]))
        logits, confidence = draft.forward_train(
            taps, mask, rows, jnp.asarray(expected["train.prev_tokens"]), case.tables
        )
        target_logits = case.tables.compute_logits(jnp.asarray(expected["train.target_hidden"]))
        loss = dspark_compact.compact_loss(logits, confidence, target_logits, jnp.asarray(expected["train.labels"]))
        hidden = draft.hidden_train(taps, mask, rows)
        outputs = {
            "block_hidden": hidden,
            "base_logits": draft.compute_logits(hidden, case.tables),
            "draft_logits": logits,
        }
        return loss.total, (
            {**outputs, "confidence": confidence, "target_logits": target_logits, "anchor_emb": rows},
            loss,
        )

    gradients, (outputs, loss) = jax.jit(jax.grad(loss_of, has_aux=True))(params)
    flat = {".".join(str(key) for key in path): variable[...] for path, variable in nnx.to_flat_state(gradients)}
    return {
        "outputs": outputs,
        "loss": loss,
        "gradients": {name: flat[parameter_path(name)] for name in tensor_shapes(case.draft.config)},
    }


def test_the_training_forward_is_the_recorded_one(case: Case, trained: dict[str, Any]) -> None:
    for name, value in trained["outputs"].items():
        np.testing.assert_allclose(value, case.expected[f"train.{name}"], rtol=0, atol=TOLERANCE, err_msg=name)


def test_the_training_forward_needs_no_mask_where_nothing_is_padded(case: Case) -> None:
    expected = case.expected
    full = int(np.flatnonzero(expected["train.context_mask"].all(axis=1))[0])
    rows = slice(full, full + 1)
    anchors = case.tables.embed_tokens(jnp.asarray(expected["train.anchor_tokens"][rows]))
    logits, _ = case.draft.forward_train(
        jnp.asarray(expected["train.context_taps"][rows]),
        None,
        anchors,
        jnp.asarray(expected["train.prev_tokens"][rows]),
        case.tables,
    )
    np.testing.assert_allclose(logits, expected["train.draft_logits"][rows], rtol=0, atol=TOLERANCE)


def test_teacher_forcing_equals_the_chain_that_picks_the_same_tokens(case: Case) -> None:
    base_logits, previous = (
        jnp.asarray(case.expected["train.base_logits"]),
        jnp.asarray(case.expected["train.prev_tokens"]),
    )
    labels = jnp.asarray(case.expected["train.labels"])
    _, corrected, _ = case.draft.draft_chain(base_logits, previous[:, 0], lambda logits, slot: labels[:, slot])
    np.testing.assert_array_equal(corrected, case.draft.teacher_forced_logits(base_logits, previous))


def test_every_loss_term_is_the_recorded_one(case: Case, trained: dict[str, Any]) -> None:
    loss = trained["loss"]
    recorded = {
        "weights": loss.weights,
        "ce_per_slot": loss.cross_entropy_per_slot,
        "l1_per_slot": loss.l1_per_slot,
        "accept_label": loss.acceptance,
        "bce_per_slot": loss.confidence_per_slot,
        "ce": loss.cross_entropy,
        "tv": loss.distance,
        "confidence": loss.confidence,
        "total": loss.total,
        "accept_per_position": loss.acceptance_per_slot,
        "tau_per_anchor": loss.tau_per_anchor,
        "tau": loss.tau_per_anchor.mean(),
    }
    assert {f"loss.{name}" for name in recorded} == {name for name in case.expected if name.startswith("loss.")}
    for name, value in recorded.items():
        wanted = case.expected[f"loss.{name}"]
        np.testing.assert_allclose(np.reshape(value, wanted.shape), wanted, rtol=0, atol=TOLERANCE, err_msg=name)


def test_gradients_are_the_recorded_ones(case: Case, trained: dict[str, Any]) -> None:
    checked = 0
    for name, gradient in trained["gradients"].items():
        np.testing.assert_allclose(
            np.linalg.norm(gradient), case.expected[f"grad_norm.{name}"][0], rtol=1e-3, atol=1e-5, err_msg=name
        )
        if f"grad.{name}" in case.expected:
            wanted = case.expected[f"grad.{name}"]
            np.testing.assert_allclose(np.reshape(gradient, wanted.shape), wanted, rtol=1e-3, atol=1e-5, err_msg=name)
            checked += 1
    assert checked == sum(name.startswith("grad.") for name in case.expected)
