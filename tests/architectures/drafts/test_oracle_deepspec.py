"""DeepSpec's Qwen3 drafts against outputs of the reference: four rounds of one sequence with one paged cache."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.architectures.dspark_deepspec.model import ContextKV
from dspark_jax.architectures.nn.attention.kv_cache import KVCache, KVPages
from dspark_jax.architectures.nn.attention.ragged_batch import PADDING_POSITION, RaggedBatch
from dspark_jax.pipelines.checkpoints.loading import LoadedTarget, load_draft, load_target
from dspark_jax.speculators_common.heads.confidence_head import confident_length
from tests.support.compilation import ordinary_compilation
from tests.support.recorded_tensors import load_recorded
from tests.support.recorded_variants import DEEPSPEC_VARIANTS

ROUNDS = range(4)
PAGE_SIZE, NUM_PAGES = 4, 6
TOLERANCE = 1e-4

pytestmark = pytest.mark.usefixtures("quick_compilation")


@dataclasses.dataclass(frozen=True)
class Replayed:
    """One variant: the draft, the recorded tensors of the reference, and the results of our draft for each round."""

    draft: Any
    expected: dict[str, np.ndarray]
    rounds: list[dict[str, Any]]

    def assert_close(self, name: str) -> None:
        """Check that our `name` of every round is the recorded one."""
        for index in ROUNDS:
            np.testing.assert_allclose(
                self.rounds[index][name],
                self.expected[f"r{index}.{name}"],
                rtol=0,
                atol=TOLERANCE,
                err_msg=f"round {index}",
            )


@pytest.fixture(scope="module")
def target(data_dir: Path) -> LoadedTarget:
    """A target of the sizes that the drafts state. They have their own embedding and head."""
    return load_target(data_dir / "D_loop" / "target", jnp.float32)


@pytest.fixture(scope="module", params=DEEPSPEC_VARIANTS)
def replayed(request: pytest.FixtureRequest, data_dir: Path, target: LoadedTarget) -> Replayed:
    return _replayed(data_dir / "A_deepspec_qwen3" / request.param, target)


def _replayed(folder: Path, target: LoadedTarget) -> Replayed:
    draft = load_draft(folder, target, jnp.float32).module
    expected = load_recorded(folder)
    # Pages in an irregular order, so that only the page table says where a position is stored.
    cache = KVCache(
        pages=KVPages.zeros(draft.kv_params(PAGE_SIZE), NUM_PAGES),
        page_table=jnp.asarray([[3, 0, 5, 1, 4, 2]], jnp.int32),
        lengths=jnp.zeros((1,), jnp.int32),
    )
    one_round = jax.jit(functools.partial(_one_round, draft))
    rounds: list[dict[str, Any]] = []
    for index in ROUNDS:
        start, count = int(expected[f"r{index}.start"][0]), int(expected[f"r{index}.num_new_context"][0])
        positions = np.asarray([[*range(start - count, start), *[PADDING_POSITION] * (9 - count)]], np.int32)
        cache, results = one_round(
            cache,
            _padded(expected[f"r{index}.context_taps"]),
            positions,
            expected[f"r{index}.start"],
            expected["token_ids"][start : start + 1],
            expected[f"r{index}.tf_tokens"],
        )
        results = {name: np.asarray(value)[0] for name, value in results.items()}
        # The values beyond the length of a padded context have no meaning.
        results["context_feature"] = results["context_feature"][:count]
        of_round = {name: value[:, :start] if name.endswith("_ctx") else value for name, value in results.items()}
        if not draft.config.enable_confidence_head:
            of_round |= {"confidence_logits": None, "tf_confidence_logits": None}
        rounds.append({**of_round, "start": start})
    return Replayed(draft, expected, rounds)


def _one_round(
    draft: Any, cache: KVCache, taps: Any, positions: Any, start: Any, anchor: Any, imposed: Any
) -> tuple[KVCache, dict[str, Any]]:
    """One round over a paged cache, by the methods that the compiled round calls. Every result has one row."""
    context = draft.project_target_hidden(taps)
    cache = draft.materialize_kv(context, RaggedBatch.rectangle(jnp.zeros_like(positions), positions), cache)
    cache = dataclasses.replace(cache, lengths=start)
    embeds = draft.embed_block(anchor)
    hidden = draft.forward_block(embeds, cache)
    base_logits = draft.compute_logits(hidden)
    tokens, corrected, _ = draft.draft_chain(base_logits, anchor, hidden=hidden)
    _, imposed_logits, _ = draft.draft_chain(
        base_logits, anchor, lambda logits, slot: imposed[slot][None], hidden=hidden
    )
    results = {
        "context_feature": context[None],
        "block_embedding": embeds,
        "block_hidden": hidden,
        "base_logits": base_logits,
        "sampled_tokens": tokens,
        "corrected_logits": corrected,
        "tf_corrected_logits": imposed_logits,
    }
    if draft.config.enable_confidence_head:
        results |= {
            "confidence_logits": draft.predict_confidence(hidden, anchor, tokens),
            "tf_confidence_logits": draft.predict_confidence(hidden, anchor, imposed[None]),
        }
    else:
        assert draft.predict_confidence(hidden, anchor, tokens) is None
    x, angles = embeds, draft.block_angles(cache)
    for number, layer in enumerate(draft.layers):
        keys, values = cache.read(number)
        normed = layer.input_norm(x)
        own_keys, own_values = (part.swapaxes(1, 2) for part in layer.attention.keys_values(normed, angles))
        attended = layer.attention(normed, angles, cache, x.shape[1])
        x = layer(x, angles, cache, x.shape[1])
        found = {"k_ctx": keys, "v_ctx": values, "k_block": own_keys, "v_block": own_values}
        results |= {f"layer{number}.{name}": value for name, value in {**found, "attn_out": attended, "out": x}.items()}
    return cache, results


def _padded(taps: np.ndarray) -> Any:
    """The new context padded to nine tokens.

    The padding has large values, so that a test fails if one is stored by mistake.
    """
    return jnp.asarray(np.concatenate([taps, np.full((9 - len(taps), taps.shape[1]), 1e3, np.float32)]))


@pytest.mark.parametrize("variant", ["gated", "rnn"])
def test_the_round_that_a_user_runs_gives_the_reference_s_values(
    variant: str, data_dir: Path, target: LoadedTarget
) -> None:
    """With XLA's ordinary optimisation. The other tests use a level that compiles faster."""
    with ordinary_compilation():
        ordinary = _replayed(data_dir / "A_deepspec_qwen3" / variant, target)
    for name in ("layer1.k_ctx", "layer1.out", "base_logits", "corrected_logits", "confidence_logits"):
        ordinary.assert_close(name)
    for index in ROUNDS:
        assert (
            ordinary.rounds[index]["sampled_tokens"].tolist() == ordinary.expected[f"r{index}.sampled_tokens"].tolist()
        )


def test_taps_are_the_recorded_states_that_the_config_names(replayed: Replayed) -> None:
    """Tap j is the recorded hidden state j of the target, and features are concatenated in the order of the taps."""
    for index in ROUNDS:
        states = replayed.expected[f"r{index}.target_hidden_all"]
        wanted = np.concatenate([states[tap] for tap in replayed.draft.config.taps], axis=-1)
        np.testing.assert_array_equal(replayed.expected[f"r{index}.context_taps"], wanted)


def test_context_features_are_the_reference_s(replayed: Replayed) -> None:
    replayed.assert_close("context_feature")


def test_the_cache_holds_the_reference_s_context_keys_and_values(replayed: Replayed) -> None:
    for layer in range(replayed.draft.config.num_hidden_layers):
        replayed.assert_close(f"layer{layer}.k_ctx")
        replayed.assert_close(f"layer{layer}.v_ctx")


def test_the_block_is_embedded_and_run_as_in_the_reference(replayed: Replayed) -> None:
    replayed.assert_close("block_embedding")
    for layer in range(replayed.draft.config.num_hidden_layers):
        for name in ("k_block", "v_block", "attn_out", "out"):
            replayed.assert_close(f"layer{layer}.{name}")
    replayed.assert_close("block_hidden")


def test_logits_are_the_reference_s_before_and_after_the_markov_bias(replayed: Replayed) -> None:
    replayed.assert_close("base_logits")
    replayed.assert_close("corrected_logits")


def test_greedy_drafts_are_exactly_the_reference_s(replayed: Replayed) -> None:
    for index in ROUNDS:
        assert (
            replayed.rounds[index]["sampled_tokens"].tolist() == replayed.expected[f"r{index}.sampled_tokens"].tolist()
        )


def test_heads_under_imposed_tokens_are_the_reference_s(replayed: Replayed) -> None:
    replayed.assert_close("tf_corrected_logits")
    if replayed.draft.config.enable_confidence_head:
        replayed.assert_close("tf_confidence_logits")


def test_confidence_and_proposal_lengths_are_the_reference_s(replayed: Replayed) -> None:
    if not replayed.draft.config.enable_confidence_head:
        assert all(results["confidence_logits"] is None for results in replayed.rounds)
        assert not any("confidence_logits" in name for name in replayed.expected)
        return
    replayed.assert_close("confidence_logits")
    thresholds = jnp.asarray(replayed.expected["thresholds"])
    for index in ROUNDS:
        logits = replayed.rounds[index]["confidence_logits"]
        lengths = confident_length(jnp.broadcast_to(logits, (len(thresholds), len(logits))), thresholds)
        assert lengths.tolist() == replayed.expected[f"r{index}.proposal_length"].tolist()


def test_row_batched_calls_over_ragged_rows_give_the_same_blocks(replayed: Replayed) -> None:
    """Row b is round b: contexts of 9, 12, 13 and 19 positions, padded with values that must not be seen."""
    draft, expected = replayed.draft, replayed.expected
    starts = [results["start"] for results in replayed.rounds]
    context_kv = _context_lines(draft, expected, starts)
    anchors = jnp.asarray(expected["token_ids"][starts])
    for number in (0, 2, 5):
        threshold = float(expected["thresholds"][number])
        rows = jax.device_get(draft.draft_rows(context_kv, anchors, jnp.asarray(starts, jnp.int32), threshold))
        for index in ROUNDS:
            np.testing.assert_allclose(
                rows.base_logits[index], expected[f"r{index}.base_logits"], rtol=0, atol=TOLERANCE
            )
            assert rows.tokens[index].tolist() == expected[f"r{index}.sampled_tokens"].tolist()
            assert int(rows.lengths[index]) == int(expected[f"r{index}.proposal_length"][number])
            confidence_logits = expected.get(f"r{index}.confidence_logits")
            wanted = np.ones(5) if confidence_logits is None else 1 / (1 + np.exp(-confidence_logits))
            np.testing.assert_allclose(rows.confidences[index], wanted, rtol=0, atol=TOLERANCE)


def test_a_single_block_equals_its_row_of_the_batch(replayed: Replayed) -> None:
    draft, expected = replayed.draft, replayed.expected
    starts = [results["start"] for results in replayed.rounds]
    context_kv = _context_lines(draft, expected, starts)
    rows = draft.draft_rows(context_kv, jnp.asarray(expected["token_ids"][starts]), jnp.asarray(starts, jnp.int32), 0.5)
    index, start = 2, starts[2]
    alone = tuple(
        (keys[index : index + 1, :, :start], values[index : index + 1, :, :start]) for keys, values in context_kv
    )
    single = draft.draft_block(alone, jnp.asarray(expected["token_ids"][start]), jnp.asarray(start, jnp.int32), 0.5)
    assert single.tokens[0].tolist() == rows.tokens[index].tolist()
    assert int(single.lengths[0]) == int(rows.lengths[index])
    np.testing.assert_allclose(single.base_logits[0], rows.base_logits[index], rtol=0, atol=1e-5)
    np.testing.assert_allclose(single.confidences[0], rows.confidences[index], rtol=0, atol=1e-5)


def test_row_batched_context_equals_the_recorded_cache(replayed: Replayed) -> None:
    draft, expected = replayed.draft, replayed.expected
    last, start = ROUNDS[-1], replayed.rounds[-1]["start"]
    context = draft.project_context(jnp.asarray(_all_taps(expected, last))[None])
    by_row = draft.project_context_kv_rows(context, jnp.zeros((1,), jnp.int32))
    at_positions = draft.project_context_kv(context, jnp.arange(start, dtype=jnp.int32))
    for layer in range(draft.config.num_hidden_layers):
        for keys, values in (by_row[layer], at_positions[layer]):
            np.testing.assert_allclose(keys[0], expected[f"r{last}.layer{layer}.k_ctx"], rtol=0, atol=TOLERANCE)
            np.testing.assert_allclose(values[0], expected[f"r{last}.layer{layer}.v_ctx"], rtol=0, atol=TOLERANCE)


def _all_taps(expected: dict[str, np.ndarray], last: int) -> np.ndarray:
    return np.concatenate([expected[f"r{index}.context_taps"] for index in range(last + 1)])


def _context_lines(draft: Any, expected: dict[str, np.ndarray], starts: list[int]) -> ContextKV:
    taps = _all_taps(expected, ROUNDS[-1])
    lines = [
        np.concatenate([taps[:start], np.full((len(taps) - start, taps.shape[1]), 7.0, np.float32)]) for start in starts
    ]
    return draft.project_context_kv_rows(
        draft.project_context(jnp.asarray(np.stack(lines))), jnp.zeros((len(starts),), jnp.int32)
    )
