"""Drafts in the speculators format against outputs of that library: every anchor of two batches, and greedy blocks.

The library runs a packed sequence under one mask. Here every anchor is a row, and the cache of the row holds the
positions of its document before the anchor. Tests of base logits and confidence are teacher-forced: the token before
every slot is given.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark_jax.architectures.nn.attention.kv_cache import KVCache, KVPages
from dspark_jax.architectures.nn.attention.ragged_batch import PADDING_POSITION, RaggedBatch
from dspark_jax.pipelines.checkpoints.checkpoint import open_checkpoint
from dspark_jax.pipelines.checkpoints.loading import (
    LoadedDraft,
    LoadedTarget,
    load_draft,
    load_target,
    parse_checkpoint,
)
from tests.support.compilation import ordinary_compilation
from tests.support.recorded_tensors import load_recorded
from tests.support.tiny_checkpoints import TinyCheckpoint

# (origin of the embedding, origin of the head) by folder. The older layout stores both, the newer one at most a pruned
# head.
TABLES = {
    "pruned_anchor_full_vanilla": ("target", "own"),
    "pruned_noanchor_full_vanilla": ("target", "own"),
    "pruned_anchor_sliding_gated": ("target", "own"),
    "full_noanchor_mixed_rnn": ("target", "target"),
    "full_anchor_mixed_rnn": ("target", "target"),
    "full_anchor_slidingnoncausal_vanilla": ("target", "target"),
    "pruned_anchor_full_rank0": ("target", "own"),
    "pruned_noanchor_sliding_gated_noconf": ("target", "own"),
    "legacy_pruned_anchor_full_vanilla": ("own", "own"),
    "legacy_full_anchor_mixed_gated": ("own", "own"),
}
Batch = Literal["packed", "single"]
BATCHES: tuple[Batch, ...] = ("packed", "single")
ROWS, LENGTH, PAGE_SIZE = 6, 48, 16  # both batches are padded to these sizes
TOLERANCE = 1e-4

pytestmark = pytest.mark.usefixtures("quick_compilation")


@dataclasses.dataclass(frozen=True)
class Case:
    """One recorded folder: the draft, its target, the recorded tensors, and our states of every block.

    There are two batches. Our states have one row per anchor.
    """

    loaded: LoadedDraft
    target: LoadedTarget
    expected: dict[str, np.ndarray]
    hidden: dict[Batch, Any]

    @property
    def draft(self) -> Any:
        return self.loaded.module

    @property
    def slots(self) -> slice:
        """The slots that propose a draft."""
        return slice(0, None) if self.draft.config.sample_from_anchor else slice(1, None)

    def anchors(self, batch: Batch) -> Any:
        tokens = self.expected[f"{batch}.in.input_ids"][self.expected[f"{batch}.anchors"]]
        return jnp.asarray(np.pad(tokens, (0, ROWS - len(tokens))))

    def block_tokens(self, batch: Batch) -> np.ndarray:
        """The tokens of the data at the positions of each block, `[anchors, W]`."""
        ids, index = self.expected[f"{batch}.in.input_ids"], self.expected[f"{batch}.block_token_index"]
        return ids[np.minimum(index, len(ids) - 1)]

    def assert_close(self, actual: Any, name: str, slots: slice | None = None) -> None:
        wanted = self.expected[name] if slots is None else self.expected[name][:, slots]
        np.testing.assert_allclose(np.asarray(actual)[: len(wanted)], wanted, rtol=0, atol=TOLERANCE, err_msg=name)


@pytest.fixture(scope="module", params=list(TABLES))
def case(request: pytest.FixtureRequest, data_dir: Path) -> Case:
    case = _loaded(data_dir / "C_speculators" / request.param)
    for batch in BATCHES:
        case.hidden[batch] = _hidden(case, case.anchors(batch), *_context_rows(case.expected, batch))
    return case


def _loaded(folder: Path) -> Case:
    _, config = parse_checkpoint(open_checkpoint(folder), "draft")
    target = load_target(folder / config.target_name, jnp.float32)
    return Case(load_draft(folder, target, jnp.float32), target, load_recorded(folder), {})


def _context_rows(expected: dict[str, np.ndarray], batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Taps `[LENGTH, mH]`, positions `[ROWS, LENGTH]` and anchor positions `[ROWS]`, with one row per anchor.

    The context of a row is that of its document, strictly before the anchor. Positions start at 0 in every document.
    """
    taps, documents = expected[f"{batch}.in.hidden_states"], expected[f"{batch}.in.document_ids"]
    places, anchors = expected[f"{batch}.in.position_ids"], expected[f"{batch}.anchors"]
    positions = np.full((ROWS, LENGTH), PADDING_POSITION, np.int32)
    index = np.arange(len(documents))
    for row, anchor in enumerate(anchors):
        seen = (documents == documents[anchor]) & (index < anchor)
        positions[row, : len(index)] = np.where(seen, places, PADDING_POSITION)
    lengths = np.pad(places[anchors], (0, ROWS - len(anchors))).astype(np.int32)
    return np.pad(taps, ((0, LENGTH - len(taps)), (0, 0))), positions, lengths


def _hidden(case: Case, anchors: Any, taps: Any, positions: Any, lengths: Any) -> Any:
    """The states of the block slots, with one row per anchor."""
    draft, pages_per_row = case.draft, LENGTH // PAGE_SIZE
    cache = KVCache(
        pages=KVPages.zeros(draft.kv_params(PAGE_SIZE), ROWS * pages_per_row),
        page_table=jnp.arange(ROWS * pages_per_row, dtype=jnp.int32).reshape(ROWS, pages_per_row),
        lengths=jnp.asarray(lengths),
    )
    flat = RaggedBatch.rectangle(jnp.zeros((ROWS, LENGTH), jnp.int32), jnp.asarray(positions))
    features = draft.project_target_hidden(jnp.asarray(taps))
    cache = draft.materialize_kv(jnp.tile(features, (ROWS, 1)), flat, cache)
    return draft.forward_block(draft.embed_block(anchors, case.target.module), cache)


def _corrected(draft: Any, base_logits: Any, previous: np.ndarray, hidden: Any) -> Any:
    """Base logits plus the Markov bias of the given previous tokens, for all slots from left to right."""
    head = draft.markov_head
    if head is None:
        return base_logits
    state, biases = head.initial_state(ROWS), []
    for slot in range(hidden.shape[1]):
        bias, state = head.bias(head.embed(jnp.asarray(previous[:, slot])), hidden[:, slot], state)
        biases.append(bias)
    return base_logits + jnp.stack(biases, axis=1)[:, hidden.shape[1] - base_logits.shape[1] :]


def _all_logits(case: Case, batch: Batch) -> Any:
    """Base logits of all slots, including slot 0 of a fill-in draft."""
    hidden = case.hidden[batch]
    if not case.draft.config.sample_from_anchor:
        hidden = jnp.concatenate([jnp.zeros_like(hidden[:, :1]), hidden], axis=1)
    return case.draft.compute_logits(hidden, case.target.module)


def _previous(case: Case, batch: Batch) -> np.ndarray:
    """The token of the data before the one that each slot proposes; for slot 0 the anchor, in both layouts."""
    tokens = case.block_tokens(batch)
    if not case.draft.config.sample_from_anchor:
        tokens = np.concatenate([tokens[:, :1], tokens[:, :-1]], axis=1)
    return np.pad(tokens, ((0, ROWS - len(tokens)), (0, 0)))


def test_the_tables_that_a_file_lacks_are_the_target_s(case: Case, request: pytest.FixtureRequest) -> None:
    tables = case.loaded.tables
    assert (tables.embed_tokens, tables.lm_head) == TABLES[request.node.callspec.params["case"]]
    assert (case.draft.has_own_embed_tokens, case.draft.has_own_lm_head) == (
        tables.embed_tokens == "own",
        tables.lm_head == "own",
    )


def test_the_target_gives_the_recorded_taps_and_last_states(case: Case) -> None:
    """Each document of both batches runs alone. The recorded last states are those before the final norm."""
    config, target = case.draft.config, case.target.module
    texts, wanted = [], []
    for batch in BATCHES:
        documents = case.expected[f"{batch}.in.document_ids"]
        for document in sorted(set(documents.tolist()) - {-1}):
            here = documents == document
            texts.append(case.expected[f"{batch}.in.input_ids"][here])
            wanted.append(
                [case.expected[f"{batch}.in.{name}"][here] for name in ("hidden_states", "verifier_last_hidden_states")]
            )
    length = max(map(len, texts))
    tokens = np.stack([np.pad(text, (0, length - len(text))) for text in texts])
    positions = np.stack([[*range(len(text)), *[PADDING_POSITION] * (length - len(text))] for text in texts])
    pages_per_row = -(-length // PAGE_SIZE)
    cache = KVCache(
        pages=KVPages.zeros(target.kv_params(PAGE_SIZE), len(texts) * pages_per_row),
        page_table=jnp.arange(len(texts) * pages_per_row, dtype=jnp.int32).reshape(len(texts), pages_per_row),
        lengths=jnp.zeros((len(texts),), jnp.int32),
    )
    whole = RaggedBatch.rectangle(jnp.asarray(tokens, jnp.int32), jnp.asarray(positions, jnp.int32))
    taps = (*config.taps, target.config.num_hidden_layers)
    _, tapped, _ = jax.jit(lambda *given: target.forward(*given, taps))(whole, cache)
    tapped = np.asarray(tapped).reshape(len(texts), length, -1)
    width = len(config.taps) * target.config.hidden_size
    for row, (text, (hidden, last)) in enumerate(zip(texts, wanted, strict=True)):
        np.testing.assert_allclose(tapped[row, : len(text), :width], hidden, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(tapped[row, : len(text), width:], last, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("batch", BATCHES)
def test_block_states_of_every_anchor_are_the_library_s(case: Case, batch: Batch) -> None:
    case.assert_close(case.hidden[batch], f"{batch}.block_hidden")


@pytest.mark.parametrize("batch", BATCHES)
def test_base_logits_of_every_anchor_are_the_library_s(case: Case, batch: Batch) -> None:
    """The logits of all slots, including slot 0 of a fill-in draft.

    For such a draft an empty slot is put before slot 0, so that the empty slot is dropped in its place.
    """
    case.assert_close(_all_logits(case, batch), f"{batch}.base_logits")


@pytest.mark.parametrize("batch", BATCHES)
def test_teacher_forced_logits_are_the_library_s(case: Case, batch: Batch) -> None:
    corrected = _corrected(case.draft, _all_logits(case, batch), _previous(case, batch), case.hidden[batch])
    case.assert_close(corrected, f"{batch}.corrected_logits")


@pytest.mark.parametrize("batch", BATCHES)
def test_teacher_forced_confidence_is_the_library_s(case: Case, batch: Batch) -> None:
    tokens = np.pad(case.block_tokens(batch), ((0, ROWS - len(case.block_tokens(batch))), (0, 0)))
    # Draft i is the token of the data at position anchor + 1 + i. No slot reads the last draft of a block, so any token
    # may stand for it.
    proposed = (
        tokens[:, 1:]
        if not case.draft.config.sample_from_anchor
        else np.concatenate([tokens[:, 1:], tokens[:, :1]], axis=1)
    )
    confidence = case.draft.predict_confidence(case.hidden[batch], case.anchors(batch), jnp.asarray(proposed))
    if confidence is None:
        assert f"{batch}.confidence_logits" not in case.expected
    else:
        case.assert_close(confidence, f"{batch}.confidence_logits", case.slots)


@pytest.mark.parametrize("batch", BATCHES)
def test_confidence_of_every_slot_is_the_library_s(case: Case, batch: Batch) -> None:
    """The confidence of all slots, including slot 0 of a fill-in draft. The token before that slot is the anchor."""
    head, markov = case.draft.confidence_head, case.draft.markov_head
    if head is None:
        assert f"{batch}.confidence_logits" not in case.expected
        return
    previous = jnp.asarray(_previous(case, batch))
    embedded = markov.embed(previous) if case.draft.config.confidence_head_with_markov else None
    case.assert_close(head(case.hidden[batch], embedded), f"{batch}.confidence_logits")


@pytest.mark.parametrize("batch", BATCHES)
def test_the_target_s_logits_over_the_draft_vocabulary_are_the_library_s(case: Case, batch: Batch) -> None:
    """The target's logits that training compares the logits of a slot with.

    They belong to the position before the token that the slot proposes, and are made from the states before the norm.
    """
    target, table = case.target.module, case.draft.draft_to_target
    states = case.expected[f"{batch}.in.verifier_last_hidden_states"]
    logits = np.asarray(target.compute_logits(target.norm(jnp.asarray(states))))
    logits = logits if table is None else logits[:, np.asarray(table[...])]
    places = case.expected[f"{batch}.block_token_index"] - (0 if case.draft.config.sample_from_anchor else 1)
    inside = (places >= 0) & (places < len(states))
    assert inside.mean() > 0.8
    wanted = case.expected[f"{batch}.targets"]
    np.testing.assert_allclose(logits[places[inside]], wanted[inside], rtol=0, atol=TOLERANCE)


def test_greedy_logits_of_every_slot_are_the_library_s(case: Case) -> None:
    """The logits of all slots, including slot 0 of a fill-in draft, with the recorded previous tokens."""
    wanted = case.expected["single.greedy.prev_tokens"]
    previous = np.pad(wanted, ((0, ROWS - len(wanted)), (0, 0)))
    corrected = _corrected(case.draft, _all_logits(case, "single"), previous, case.hidden["single"])
    case.assert_close(corrected, "single.greedy.corrected_logits")


def test_greedy_blocks_are_the_library_s(case: Case) -> None:
    hidden, anchors = case.hidden["single"], case.anchors("single")
    base_logits = case.draft.compute_logits(hidden, case.target.module)
    drafts, corrected, _ = case.draft.draft_chain(base_logits, anchors, hidden=hidden)
    wanted = case.expected["single.greedy.tokens"]
    assert drafts[: len(wanted)].tolist() == wanted.tolist()
    case.assert_close(corrected, "single.greedy.corrected_logits", case.slots)
    confidence = case.draft.predict_confidence(hidden, anchors, drafts)
    if confidence is not None:
        case.assert_close(confidence, "single.greedy.confidence_logits")
    previous = np.concatenate([np.asarray(anchors)[:, None], np.asarray(drafts)[:, :-1]], axis=1)[: len(wanted)]
    assert previous.tolist() == case.expected["single.greedy.prev_tokens"][:, case.slots].tolist()


@pytest.mark.parametrize("folder", ["full_noanchor_mixed_rnn", "pruned_anchor_sliding_gated"])
def test_the_block_that_a_user_runs_gives_the_library_s_values(folder: str, data_dir: Path) -> None:
    """With XLA's ordinary optimisation. The other tests use a level that compiles faster.

    Context, block, Markov chain and confidence are one program.
    """
    case = _loaded(data_dir / "C_speculators" / folder)
    draft = case.draft

    def run(anchors: Any, *context: Any) -> Any:
        hidden = _hidden(case, anchors, *context)
        base_logits = draft.compute_logits(hidden, case.target.module)
        drafts, corrected, _ = draft.draft_chain(base_logits, anchors, hidden=hidden)
        return hidden, base_logits, drafts, corrected, draft.predict_confidence(hidden, anchors, drafts)

    with ordinary_compilation():
        compiled = jax.jit(run)
        results = {batch: compiled(case.anchors(batch), *_context_rows(case.expected, batch)) for batch in BATCHES}
    for batch in BATCHES:
        case.assert_close(results[batch][0], f"{batch}.block_hidden")
        case.assert_close(results[batch][1], f"{batch}.base_logits", case.slots)
    _, _, drafts, corrected, confidence = results["single"]
    wanted = case.expected["single.greedy.tokens"]
    assert drafts[: len(wanted)].tolist() == wanted.tolist()
    case.assert_close(corrected, "single.greedy.corrected_logits", case.slots)
    case.assert_close(confidence, "single.greedy.confidence_logits")


def test_a_pruned_head_that_the_file_lacks_is_made_of_target_rows(data_dir: Path, tmp_path: Path) -> None:
    folder = data_dir / "C_speculators" / "pruned_noanchor_full_vanilla"
    tensors = load_file(folder / "model.safetensors")
    stored = tensors.pop("lm_head.weight")
    lean = TinyCheckpoint(config=open_checkpoint(folder).config, tensors=tensors).write(tmp_path)
    target = load_target(folder / "../verifier", jnp.float32)
    loaded = load_draft(lean, target, jnp.float32)
    assert loaded.tables.lm_head == "target_rows"
    assert not loaded.module.has_own_lm_head
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 64)), jnp.float32)
    np.testing.assert_allclose(
        loaded.module.compute_logits(hidden, target.module)[0], hidden[0, 1:] @ stored.T, rtol=0, atol=TOLERANCE
    )
