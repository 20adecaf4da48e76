"""The inputs of a DeepSpec draft in each recorded round: block ids, positions, and the context after acceptance."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.architectures.nn.attention.block_context import DenseContext
from dspark_jax.architectures.nn.rotary import rotary_angles
from dspark_jax.pipelines.checkpoints.loading import load_draft, load_target
from tests.support.recorded_tensors import RecordedTensors, load_recorded
from tests.support.recorded_variants import DEEPSPEC_VARIANTS, GEMMA4_VARIANTS

FOLDERS = [
    *(f"A_deepspec_qwen3/{variant}" for variant in DEEPSPEC_VARIANTS),
    *(f"B_deepspec_gemma4/{variant}" for variant in GEMMA4_VARIANTS),
]
ROUNDS = range(4)

pytestmark = pytest.mark.usefixtures("quick_compilation")


@dataclasses.dataclass(frozen=True)
class Recorded:
    """One draft and the recorded tensors."""

    draft: Any
    expected: RecordedTensors

    def number(self, index: int, name: str) -> int:
        """A recorded number of round `index`."""
        return int(self.expected[f"r{index}.{name}"][0])


@pytest.fixture(scope="module", params=FOLDERS)
def recorded(request: pytest.FixtureRequest, data_dir: Path) -> Recorded:
    target = load_target(data_dir / "D_loop" / "target", jnp.float32)
    folder = data_dir / request.param
    return Recorded(load_draft(folder, target, jnp.float32).module, load_recorded(folder))


def test_the_block_is_the_anchor_and_masks(recorded: Recorded) -> None:
    """The rows of our block are the embedding rows of the recorded ids."""
    draft = recorded.draft
    for index in ROUNDS:
        ids = recorded.expected[f"r{index}.draft_input_ids"]
        anchor = recorded.expected["token_ids"][recorded.number(index, "start")]
        assert ids.tolist() == [anchor, *[draft.config.mask_token_id] * (draft.config.block_size - 1)]
        block = draft.embed_block(jnp.asarray([anchor]))[0]
        np.testing.assert_array_equal(block, draft.embed_block(jnp.asarray(ids))[:, 0])


def test_context_and_block_stand_at_the_recorded_positions(recorded: Recorded) -> None:
    """The new context is directly before the anchor, and slot k is k positions after it, also in our rotations."""
    draft = recorded.draft
    for index in ROUNDS:
        start, count = recorded.number(index, "start"), recorded.number(index, "num_new_context")
        positions, width = recorded.expected[f"r{index}.position_ids"], draft.config.block_size
        assert positions[:count].tolist() == list(range(start - count, start))
        context = DenseContext(
            keys_values=(),
            positions=jnp.zeros((1, 0), jnp.int32),
            lengths=jnp.asarray([start], jnp.int32),
            softmax=draft.platform.softmax,
        )
        ours = draft.block_angles(context)
        wanted = rotary_angles(jnp.asarray(positions[None, count:]), draft.config.rope)
        assert positions[count:].shape == (width,)
        for part, recorded_part in zip(ours, wanted, strict=True):
            np.testing.assert_array_equal(part, recorded_part)


def test_acceptance_leaves_its_drafts_and_one_more_row_of_context(recorded: Recorded) -> None:
    """The next round's new context is the anchor and the accepted drafts of the round before."""
    accepted = recorded.expected["accepted_after_round"]
    for index in ROUNDS[1:]:
        added = recorded.number(index, "num_new_context")
        assert added == accepted[index - 1] + 1
        assert recorded.number(index, "start") == recorded.number(index - 1, "start") + added
