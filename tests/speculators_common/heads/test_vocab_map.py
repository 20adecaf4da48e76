"""The tensors `d2t` and `t2d` of a checkpoint become one table of target ids. Wrong tensors are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.speculators_common.errors import CheckpointError
from dspark_jax.speculators_common.heads.vocab_map import target_id_table, vocabulary_tensors

IMAGE = np.array([2, 3, 7, 11, 12, 20, 30, 31])  # Vd = 8 of V = 32
OFFSETS = IMAGE - np.arange(8)


def mask_of(image: np.ndarray, vocab_size: int = 32) -> np.ndarray:
    mask = np.zeros(vocab_size, bool)
    mask[image] = True
    return mask


def built(*, vocab_size: int = 32, draft_vocab_size: int = 8, **tensors: np.ndarray) -> np.ndarray | None:
    return target_id_table(
        vocab_size=vocab_size, draft_vocab_size=draft_vocab_size, file="model.safetensors", **tensors
    )


@pytest.mark.parametrize(
    "tensors",
    [
        {"d2t": OFFSETS},
        {"t2d": mask_of(IMAGE)},
        {"d2t": OFFSETS, "t2d": mask_of(IMAGE)},
        {"d2t": OFFSETS.astype(np.int32)},
    ],
)
def test_offsets_and_mask_give_the_same_int32_table(tensors):
    table = built(**tensors)
    assert table is not None
    assert table.dtype == np.int32
    np.testing.assert_array_equal(table, IMAGE)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"d2t": np.zeros(32, np.int64)},
        {"t2d": np.ones(32, bool)},
        {"d2t": np.zeros(32, np.int64), "t2d": np.ones(32, bool)},
    ],
)
def test_equal_vocabularies_are_the_identity_without_a_table(tensors):
    assert built(draft_vocab_size=32, **tensors) is None


@pytest.mark.parametrize("tensors", [{}, {"d2t": np.zeros(40, np.int64), "t2d": np.ones(32, bool)}])
def test_a_head_padded_beyond_the_vocabulary_is_the_identity(tensors):
    assert built(draft_vocab_size=40, **tensors) is None


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        (
            {},
            "tensor d2t: missing, allowed an integer tensor of shape [8], as draft_vocab_size 8 is smaller than "
            "vocab_size 32",
        ),
        ({"draft_vocab_size": 0}, "draft_vocab_size: found 0, allowed an integer >= 1 (vocab_size is 32)"),
        ({"draft_vocab_size": -3}, "draft_vocab_size: found -3, allowed an integer >= 1 (vocab_size is 32)"),
        ({"d2t": OFFSETS[:7]}, "tensor d2t: found [7], allowed shape [8]"),
        ({"d2t": OFFSETS[:, None]}, "tensor d2t: found [8, 1], allowed shape [8]"),
        ({"d2t": OFFSETS.astype(np.float32)}, "tensor d2t: found 'float32', allowed a signed integer dtype"),
        ({"d2t": OFFSETS, "t2d": mask_of(IMAGE, 33)}, "tensor t2d: found [33], allowed shape [32]"),
        ({"t2d": mask_of(IMAGE).astype(np.int64)}, "tensor t2d: found 'int64', allowed bool"),
        (
            {"d2t": OFFSETS + np.array([0] * 7 + [1])},
            "draft id 7 with offset 25, target id 32', allowed target ids (draft id + offset) in [0, 32)",
        ),
        (
            {"d2t": OFFSETS - np.array([3] + [0] * 7)},
            "draft id 0 with offset -1, target id -1', allowed target ids (draft id + offset) in [0, 32)",
        ),
        (
            {"d2t": np.full(8, np.iinfo(np.int64).max)},
            "draft id 0 with offset 9223372036854775807, target id 9223372036854775807'",
        ),
        ({"d2t": IMAGE}, "draft id 6 with offset 30, target id 36'"),  # absolute ids where offsets belong
        (
            {"d2t": OFFSETS - np.array([0, 0, 4, 0, 0, 0, 0, 0])},
            "draft id 2 as target id 3 after target id 3', allowed target ids (draft id + offset)",
        ),
        ({"d2t": OFFSETS[::-1].copy() + np.arange(7, -8, -2)}, "draft id 1 as target id 30 after target id 31'"),
        (
            {"d2t": OFFSETS, "t2d": mask_of(np.append(IMAGE, 25))},
            "true at target id 25, 9 true in all', allowed true exactly at the 8 target ids of d2t",
        ),
        (
            {"d2t": OFFSETS, "t2d": mask_of(IMAGE[:7])},
            "false at target id 31, 7 true in all', allowed true exactly at the 8 target ids of d2t",
        ),
        (
            {"d2t": OFFSETS, "t2d": mask_of(np.append(IMAGE[1:], 5))},
            "false at target id 2, 8 true in all', allowed true exactly",
        ),
        (
            {"t2d": mask_of(np.append(IMAGE, 25))},
            "tensor t2d: found '9 true, the first surplus one at target id 31', allowed 8 true",
        ),
        (
            {"t2d": mask_of(IMAGE[:6])},
            "tensor t2d: found '6 true, none for draft id 6', allowed 8 true (draft_vocab_size)",
        ),
        (
            {"draft_vocab_size": 32, "d2t": np.arange(32)},
            "offset 1 at draft id 1', allowed only offset 0 (identity), as draft_vocab_size 32 is not smaller than "
            "vocab_size 32",
        ),
        (
            {"draft_vocab_size": 32, "t2d": mask_of(np.arange(31))},
            "tensor t2d: found 'false at target id 31', allowed only true (identity)",
        ),
        (
            {"draft_vocab_size": 40, "d2t": np.array([0] * 39 + [-9])},
            "offset -9 at draft id 39', allowed only offset 0 (identity), as draft_vocab_size 40 is not smaller than "
            "vocab_size 32",
        ),
    ],
)
def test_a_wrong_map_is_refused_with_the_first_id_at_fault(tensors, expected):
    with pytest.raises(CheckpointError) as caught:
        built(**tensors)
    assert str(caught.value).startswith("model.safetensors: ")
    assert expected in str(caught.value)


@st.composite
def vocabularies(draw) -> tuple[int, np.ndarray]:
    """A target vocabulary size and a strict, non-empty subset of its ids, ascending."""
    vocab_size = draw(st.integers(2, 200))
    image = draw(st.sets(st.integers(0, vocab_size - 1), min_size=1, max_size=vocab_size - 1))
    return vocab_size, np.array(sorted(image))


@given(vocabularies())
def test_any_subset_survives_the_round_trip_through_offsets_and_mask(vocabulary):
    vocab_size, image = vocabulary
    sizes = {"vocab_size": vocab_size, "draft_vocab_size": len(image), "file": "f"}
    for tensors in ({"d2t": image - np.arange(len(image))}, {"t2d": mask_of(image, vocab_size)}):
        table = target_id_table(**sizes, **tensors)
        assert table is not None
        np.testing.assert_array_equal(table, image)
        written = vocabulary_tensors(table, vocab_size=vocab_size, draft_vocab_size=len(image))
        assert all(np.array_equal(written[name], tensor) for name, tensor in tensors.items())
        again = target_id_table(**sizes, d2t=written["d2t"], t2d=written["t2d"])
        np.testing.assert_array_equal(again, image)


def test_the_tensors_of_a_padded_identity_are_zero_offsets_and_a_full_mask():
    written = vocabulary_tensors(np.arange(32, dtype=np.int32), vocab_size=32, draft_vocab_size=40)
    assert (written["d2t"].dtype, written["t2d"].dtype) == (np.int64, np.bool_)
    np.testing.assert_array_equal(written["d2t"], np.zeros(40))
    np.testing.assert_array_equal(written["t2d"], np.ones(32))


@given(st.integers(1, 40).flatmap(lambda n: st.lists(st.integers(-60, 60), min_size=n, max_size=n)), st.integers(1, 60))
@settings(max_examples=300)
def test_offsets_are_accepted_exactly_if_they_name_increasing_ids_of_the_vocabulary(offsets, surplus):
    vocab_size = len(offsets) + surplus
    ids = [i + offset for i, offset in enumerate(offsets)]
    valid = ids == sorted(set(ids)) and ids[0] >= 0 and ids[-1] < vocab_size
    arguments = {"vocab_size": vocab_size, "draft_vocab_size": len(offsets), "file": "f", "d2t": np.array(offsets)}
    if valid:
        np.testing.assert_array_equal(target_id_table(**arguments), ids)
    else:
        with pytest.raises(CheckpointError, match="draft id"):
            target_id_table(**arguments)


@given(vocabularies(), st.data())
def test_one_flipped_mask_entry_is_found(vocabulary, data):
    vocab_size, image = vocabulary
    mask = mask_of(image, vocab_size)
    flipped = data.draw(st.integers(0, vocab_size - 1))
    mask[flipped] = not mask[flipped]
    with pytest.raises(CheckpointError, match=f"at target id {flipped}, "):
        target_id_table(
            vocab_size=vocab_size, draft_vocab_size=len(image), file="f", d2t=image - np.arange(len(image)), t2d=mask
        )
