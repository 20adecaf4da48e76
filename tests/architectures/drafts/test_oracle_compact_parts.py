"""Parts of the compact draft against recorded values, each computed from its recorded input.

The parts are attention, the recurrent state, the confidence, and the training rows.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int32

from dspark_jax.architectures import dspark_compact
from dspark_jax.architectures.dspark_compact.training_rows import anchor_positions
from dspark_jax.architectures.nn.attention.block_context import DenseContext
from dspark_jax.speculators_common.formats.compact.format import CompactDims
from tests.support.recorded_tensors import RecordedTensors, load_recorded
from tests.support.recorded_variants import COMPACT_VARIANTS

ROUNDS, ROWS, LAYERS, WIDTH = range(2), range(4), range(2), 5
TOLERANCE = 1e-4

pytestmark = pytest.mark.usefixtures("quick_compilation")


@dataclasses.dataclass(frozen=True)
class Recorded:
    """One draft and the recorded tensors."""

    draft: dspark_compact.CompactDraft
    expected: RecordedTensors

    def batch(self, index: int, name: str) -> np.ndarray:
        """The recorded tensors of round `index` that have one entry per row."""
        return np.stack([self.expected[f"r{index}.row{row}.{name}"] for row in ROWS])

    def lines(self, index: int, name: str) -> np.ndarray:
        """The whole context as `[B, N, L, hd]`, with large values beyond the length of a row."""
        rows = [self.expected[f"r{index}.row{row}.{name}"] for row in ROWS]
        length = max(row.shape[1] for row in rows)
        return np.stack(
            [np.pad(row, ((0, 0), (0, length - row.shape[1]), (0, 0)), constant_values=1e3) for row in rows]
        )


@pytest.fixture(scope="module", params=COMPACT_VARIANTS)
def recorded(request: pytest.FixtureRequest, data_dir: Path) -> Recorded:
    folder = data_dir / "H_compact" / request.param
    dims = CompactDims(hidden_size=64, vocab_size=199, rms_norm_eps=1e-6, num_layers=6)
    return Recorded(dspark_compact.load(folder, dims=dims, target_id="tiny-target@64x199"), load_recorded(folder))


@dataclasses.dataclass
class Listening:
    """A context that stores the results of the attention over it."""

    context: DenseContext
    attended: Any = None

    @property
    def lengths(self) -> Int32[Array, "B"]:
        return self.context.lengths

    def block_attention(self, *given: Any, **named: Any) -> Float[Array, "B W N hd"]:
        self.attended = self.context.block_attention(*given, **named)
        return self.attended


def test_attention_of_every_layer_is_the_recorded_one(recorded: Recorded) -> None:
    """The attention after its output projection, from the recorded context and the recorded input of the layer."""
    for index in ROUNDS:
        lengths = recorded.expected[f"r{index}.context_lengths"]
        keys_values = tuple(
            (
                jnp.asarray(recorded.lines(index, f"layer{number}.k_ctx")),
                jnp.asarray(recorded.lines(index, f"layer{number}.v_ctx")),
            )
            for number in LAYERS
        )
        places = np.arange(lengths.max(), dtype=np.int32)[None]
        context = DenseContext(
            keys_values=keys_values,
            positions=jnp.asarray(np.where(places < lengths[:, None], places, -1)),
            lengths=jnp.asarray(lengths),
            softmax=recorded.draft.platform.softmax,
        )
        for number in LAYERS:
            entering = recorded.batch(index, "block_input" if number == 0 else f"layer{number - 1}.out")
            layer, listening = recorded.draft.layers[number], Listening(context)
            layer(jnp.asarray(entering), listening, WIDTH)
            attended = layer.output(listening.attended.reshape(len(ROWS), WIDTH, -1))
            np.testing.assert_allclose(
                attended, recorded.batch(index, f"layer{number}.attn_out"), rtol=0, atol=TOLERANCE, err_msg=f"{number}"
            )


def test_the_recurrent_state_of_every_slot_is_the_recorded_one(recorded: Recorded) -> None:
    """The state after the update of the slot, from which the bias of the slot is made. Only one head has a state."""
    head = recorded.draft.markov_head
    assert head is not None
    state = head.initial_state(len(ROWS))
    assert (state is None) == ("r0.row0.rnn_state" not in recorded.expected)
    if state is None:
        return
    for index in ROUNDS:
        state = head.initial_state(len(ROWS))
        tokens, wanted = recorded.batch(index, "sampled_tokens"), recorded.batch(index, "rnn_state")
        previous = np.concatenate([recorded.expected[f"r{index}.anchors"][:, None], tokens[:, :-1]], axis=1)
        for slot in range(WIDTH):
            _, state = head.bias(head.embed(jnp.asarray(previous[:, slot])), None, state)
            np.testing.assert_allclose(
                np.asarray(state), wanted[:, slot], rtol=0, atol=TOLERANCE, err_msg=f"slot {slot}"
            )


def test_teacher_forced_confidence_is_the_recorded_one_before_the_sigmoid(recorded: Recorded) -> None:
    expected = recorded.expected
    logits = recorded.draft.teacher_forced_confidence(
        jnp.asarray(expected["train.block_hidden"]), jnp.asarray(expected["train.prev_tokens"])
    )
    np.testing.assert_allclose(logits, expected["train.confidence_logits"], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(jax.nn.sigmoid(logits), expected["train.confidence"], rtol=0, atol=TOLERANCE)


def test_anchors_and_contexts_of_training_are_those_that_we_allow(recorded: Recorded) -> None:
    """Every recorded anchor is one that we allow, and its context is as long as ours."""
    expected = recorded.expected
    lengths, firsts = expected["train.seq_lens"], expected["train.resp_starts"]
    limit = int(expected["train.max_context"][0])
    anchors = list(zip(expected["train.anchor_seq"].tolist(), expected["train.anchor_pos"].tolist(), strict=True))
    for sequence, t in anchors:
        assert t in anchor_positions(int(lengths[sequence]), int(firsts[sequence]), WIDTH)
    ends = np.cumsum(lengths)
    rows = dspark_compact.training_rows(
        np.split(expected["train.seq_ids"], ends[:-1]),
        np.split(expected["train.seq_hidden"], ends[:-1]),
        anchors,
        hidden_size=64,
        block_size=WIDTH,
        max_context=limit,
    )
    assert rows.context_mask.sum(axis=1).tolist() == expected["train.context_lengths"].tolist()


def test_acceptance_leaves_its_drafts_and_one_more_row_of_context(recorded: Recorded) -> None:
    expected = recorded.expected
    added = expected["accepted_after_round0"] + 1
    assert expected["r1.num_new_context"].tolist() == added.tolist()
    assert expected["r1.context_lengths"].tolist() == (expected["r0.context_lengths"] + added).tolist()
