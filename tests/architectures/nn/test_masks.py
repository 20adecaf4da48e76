"""Every mask against a loop over queries and keys that states the rule."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.architectures.nn.attention.masks import block_mask, causal_mask, context_mask
from dspark_jax.speculators_common.formats.draft_config import LayerMask, WindowOrigin

WIDTH, NUM_KEYS = 5, 14
KEYS = jnp.arange(NUM_KEYS, dtype=jnp.int32)[None]
ANCHORS = (0, 1, 3, 4, 9, 14)
ORIGINS: tuple[WindowOrigin, ...] = ("anchor", "query")
LAYERS = [
    LayerMask(window=window, causal=causal) for window, causal in itertools.product((None, 1, 3, 4, 100), (False, True))
]

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_context_rows_in_sight_of_each_slot(layer: LayerMask, origin: WindowOrigin) -> None:
    found = np.asarray(context_mask(jnp.asarray(ANCHORS, jnp.int32), WIDTH, KEYS, layer, origin))
    assert found.shape == (len(ANCHORS), WIDTH, NUM_KEYS)
    for (row, anchor), slot, key in itertools.product(enumerate(ANCHORS), range(WIDTH), range(NUM_KEYS)):
        in_sight = key < anchor
        if layer.window is not None and origin == "anchor":
            in_sight = in_sight and anchor - layer.window <= key
        if layer.window is not None and origin == "query":
            in_sight = in_sight and (anchor + slot) - key < layer.window
        assert bool(found[row, slot, key]) == in_sight, (anchor, slot, key)


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_context_rows_of_training_are_seen_by_their_absolute_position(layer: LayerMask, origin: WindowOrigin) -> None:
    """Context keys may come in any order, with gaps and padding. Only their positions count."""
    anchors = (7, 40, 3)
    positions = np.asarray([[-1, -1, 0, 3, 4, 5, 6], [39, 38, 36, 37, 35, -1, 2], [0, 1, 2, 3, 4, 5, 90]], np.int32)
    found = np.asarray(context_mask(jnp.asarray(anchors, jnp.int32), WIDTH, jnp.asarray(positions), layer, origin))
    for (row, anchor), slot, place in itertools.product(enumerate(anchors), range(WIDTH), range(positions.shape[1])):
        position = positions[row, place]
        in_sight = 0 <= position < anchor
        if layer.window is not None and origin == "anchor":
            in_sight = in_sight and anchor - position <= layer.window
        if layer.window is not None and origin == "query":
            in_sight = in_sight and (anchor + slot) - position < layer.window
        assert bool(found[row, slot, place]) == in_sight, (anchor, slot, position)


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_block_slots_in_sight_of_each_other(layer: LayerMask, origin: WindowOrigin) -> None:
    found = np.asarray(block_mask(WIDTH, layer, origin))
    for query, key in itertools.product(range(WIDTH), repeat=2):
        in_sight = not (layer.causal and key > query)
        if layer.window is not None and origin == "query":
            in_sight = in_sight and query - key < layer.window and key - query < layer.window
        assert bool(found[query, key]) == in_sight, (query, key)


def test_every_slot_sees_itself() -> None:
    for layer, origin in itertools.product(LAYERS, ORIGINS):
        assert np.diagonal(block_mask(WIDTH, layer, origin)).all()


@pytest.mark.parametrize("window", [None, 1, 4])
def test_target_tokens_see_the_past_and_themselves(window: int | None) -> None:
    positions = np.asarray([[0, 1, 2], [7, 8, 9], [13, -1, -1]], np.int32)
    found = np.asarray(causal_mask(jnp.asarray(positions), NUM_KEYS, window))
    for row, token, key in itertools.product(range(3), range(3), range(NUM_KEYS)):
        query = positions[row, token]
        assert bool(found[row, token, key]) == (key <= query and (window is None or query - key < window))


def test_a_row_without_context_sees_none() -> None:
    for layer, origin in itertools.product(LAYERS, ORIGINS):
        assert not context_mask(jnp.zeros((1,), jnp.int32), WIDTH, KEYS, layer, origin).any()


def test_the_two_origins_differ_by_one_at_slot_0_and_by_one_more_per_slot() -> None:
    """A window from the anchor shows one position more than one from the slot at slot 0, and k + 1 more at slot k."""
    layer = LayerMask(window=8)
    by_anchor, by_query = (
        context_mask(jnp.asarray([12], jnp.int32), WIDTH, KEYS, layer, origin).sum(axis=-1) for origin in ORIGINS
    )
    assert (by_anchor - by_query)[0].tolist() == [1, 2, 3, 4, 5]
