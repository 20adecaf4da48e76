"""DeepSpec's Gemma 4 drafts against outputs of the reference: four rounds of one sequence with one paged cache."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark_jax.architectures.drafting.dense_rows import ContextKV
from dspark_jax.architectures.nn.attention.kv_cache import KVCache, KVPages
from dspark_jax.architectures.nn.attention.ragged_batch import PADDING_POSITION, RaggedBatch
from dspark_jax.pipelines.checkpoints.checkpoint import open_checkpoint
from dspark_jax.pipelines.checkpoints.loading import LoadedTarget, load_draft, load_target
from dspark_jax.speculators_common.errors import CheckpointError
from tests.support.compilation import ordinary_compilation
from tests.support.recorded_tensors import load_recorded
from tests.support.recorded_variants import GEMMA4_VARIANTS
from tests.support.tiny_checkpoints import TinyCheckpoint

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


@pytest.fixture(scope="module", params=GEMMA4_VARIANTS)
def replayed(request: pytest.FixtureRequest, data_dir: Path, target: LoadedTarget) -> Replayed:
    return _replayed(data_dir / "B_deepspec_gemma4" / request.param, target)


def _replayed(folder: Path, target: LoadedTarget) -> Replayed:
    draft = load_draft(folder, target, jnp.float32).module
    expected = load_recorded(folder)
    cache = KVCache(
        pages=KVPages.zeros(draft.kv_params(PAGE_SIZE), NUM_PAGES),
        page_table=jnp.asarray([[3, 0, 5, 1, 4, 2]], jnp.int32),
        lengths=jnp.zeros((1,), jnp.int32),
    )
    one_round = jax.jit(functools.partial(_one_round, draft))
    rounds = []
    for index in ROUNDS:
        given = {
            name: expected[f"r{index}.{name}"] for name in ("start", "num_new_context", "context_taps", "tf_tokens")
        }
        start, count = int(given["start"][0]), int(given["num_new_context"][0])
        # Padded to nine tokens with large values, so that the test fails if one of them is stored by mistake.
        taps = np.concatenate(
            [given["context_taps"], np.full((9 - count, given["context_taps"].shape[1]), 1e3, np.float32)]
        )
        positions = np.asarray([[*range(start - count, start), *[PADDING_POSITION] * (9 - count)]], np.int32)
        cache, results = one_round(
            cache, taps, positions, given["start"], expected["token_ids"][start : start + 1], given["tf_tokens"][None]
        )
        # The values beyond the length of a padded context have no meaning.
        results["context_feature"] = results["context_feature"][:count]
        rounds.append({name: value[:, :start] if name.endswith("_ctx") else value for name, value in results.items()})
    return Replayed(draft, expected, rounds)


def _one_round(
    draft: Any, cache: KVCache, taps: Any, positions: Any, start: Any, anchor: Any, imposed: Any
) -> tuple[KVCache, dict[str, Any]]:
    context = draft.project_target_hidden(taps)
    cache = draft.materialize_kv(context, RaggedBatch.rectangle(jnp.zeros_like(positions), positions), cache)
    cache = dataclasses.replace(cache, lengths=start)
    embeds = draft.embed_block(anchor)
    hidden = draft.forward_block(embeds, cache)
    base_logits = draft.compute_logits(hidden)
    tokens, corrected, _ = draft.draft_chain(base_logits, anchor, hidden=hidden)
    previous = jnp.concatenate([anchor[:, None], imposed[:, :-1]], axis=1)
    results = {
        "context_feature": context,
        "block_embedding": embeds[0],
        "block_hidden": hidden[0],
        "base_logits": base_logits[0],
        "sampled_tokens": tokens[0],
        "corrected_logits": corrected[0],
        "confidence_logits": draft.predict_confidence(hidden, anchor, tokens)[0],
        "tf_corrected_logits": draft.teacher_forced_logits(base_logits, previous, hidden=hidden)[0],
        "tf_confidence_logits": draft.predict_confidence(hidden, anchor, imposed)[0],
    }
    x, angles = embeds, draft.block_angles(cache)
    for number, layer in enumerate(draft.layers):
        keys, values = cache.read(number)
        own_keys, own_values = layer.attention.keys_values(layer.input_norm(x), angles)
        attended = layer.attention(layer.input_norm(x), angles, cache, x.shape[1])
        x = layer(x, angles, cache, x.shape[1])
        found = {
            "k_ctx": keys,
            "v_ctx": values,
            "k_block": own_keys.swapaxes(1, 2),
            "v_block": own_values.swapaxes(1, 2),
        }
        results |= {
            f"layer{number}.{name}": value[0] for name, value in {**found, "attn_out": attended, "out": x}.items()
        }
    return cache, results


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
    replayed.assert_close("tf_corrected_logits")


def test_the_soft_cap_bounds_the_base_logits_alone(replayed: Replayed) -> None:
    """With states ten times as large the base logits reach the cap. The Markov bias is added to them without a cap."""
    draft, results = replayed.draft, replayed.rounds[0]
    hidden = 10 * results["block_hidden"][None]
    base_logits = draft.compute_logits(hidden)
    anchor = jnp.asarray(replayed.expected["token_ids"][replayed.expected["r0.start"]])
    _, corrected, _ = draft.draft_chain(base_logits, anchor, hidden=hidden)
    if draft.config.final_logit_softcapping is None:
        assert jnp.abs(base_logits).max() > 100
    else:
        assert 29.9 < jnp.abs(base_logits).max() <= 30
        assert jnp.abs(corrected).max() > 30
    bias = results["corrected_logits"][0] - results["base_logits"][0]
    np.testing.assert_allclose(corrected[0, 0] - base_logits[0, 0], bias, rtol=0, atol=TOLERANCE)


def test_the_round_that_a_user_runs_gives_the_recorded_values(data_dir: Path, target: LoadedTarget) -> None:
    """With XLA's ordinary optimisation. The other tests use a level that compiles faster."""
    for variant in GEMMA4_VARIANTS[:2]:
        with ordinary_compilation():
            ordinary = _replayed(data_dir / "B_deepspec_gemma4" / variant, target)
        for name in ("layer1.k_ctx", "layer1.out", "base_logits", "corrected_logits", "confidence_logits"):
            ordinary.assert_close(name)
        for index in ROUNDS:
            drafts = ordinary.rounds[index]["sampled_tokens"].tolist()
            assert drafts == ordinary.expected[f"r{index}.sampled_tokens"].tolist()


def test_greedy_drafts_are_exactly_the_reference_s(replayed: Replayed) -> None:
    for index in ROUNDS:
        assert (
            replayed.rounds[index]["sampled_tokens"].tolist() == replayed.expected[f"r{index}.sampled_tokens"].tolist()
        )


def test_confidence_and_proposal_lengths_are_the_reference_s(replayed: Replayed) -> None:
    replayed.assert_close("confidence_logits")
    replayed.assert_close("tf_confidence_logits")
    thresholds = jnp.asarray(replayed.expected["thresholds"])
    for index in ROUNDS:
        logits = replayed.rounds[index]["confidence_logits"]
        lengths = replayed.draft.proposal_length(jnp.broadcast_to(logits, (len(thresholds), len(logits))), thresholds)
        assert lengths.tolist() == replayed.expected[f"r{index}.proposal_length"].tolist()


def test_row_batched_calls_over_ragged_rows_give_the_same_blocks(replayed: Replayed) -> None:
    """Row b is round b: contexts of growing length, padded with values that must not be seen."""
    draft, expected = replayed.draft, replayed.expected
    starts = [int(expected[f"r{index}.start"][0]) for index in ROUNDS]
    anchors = jnp.asarray(expected["token_ids"][starts])
    rows = draft.draft_rows(_context_lines(draft, expected, starts), anchors, jnp.asarray(starts, jnp.int32), 0.5)
    number = expected["thresholds"].tolist().index(0.5)
    for index in ROUNDS:
        np.testing.assert_allclose(rows.base_logits[index], expected[f"r{index}.base_logits"], rtol=0, atol=TOLERANCE)
        assert rows.tokens[index].tolist() == expected[f"r{index}.sampled_tokens"].tolist()
        assert int(rows.lengths[index]) == int(expected[f"r{index}.proposal_length"][number])


def _context_lines(draft: Any, expected: dict[str, np.ndarray], starts: list[int]) -> ContextKV:
    taps = np.concatenate([expected[f"r{index}.context_taps"] for index in ROUNDS])
    lines = [
        np.concatenate([taps[:start], np.full((len(taps) - start, taps.shape[1]), 7.0, np.float32)]) for start in starts
    ]
    return draft.project_context_kv_rows(
        draft.project_context(jnp.asarray(np.stack(lines))), jnp.zeros((len(starts),), jnp.int32)
    )


@pytest.mark.parametrize(
    ("variant", "name", "shape", "expected"),
    [
        (
            "keqv_softcap_vanilla",
            "layers.1.layer_scalar",
            None,
            r"tensor layers.1.layer_scalar: missing, expected shape \[1\]",
        ),
        (
            "keqv_softcap_vanilla",
            "layers.0.self_attn.v_proj.weight",
            (32, 64),
            "tensor layers.0.self_attn.v_proj.weight: unexpected",
        ),
        (
            "keqv_softcap_vanilla",
            "layers.0.self_attn.v_norm.weight",
            (32,),
            "tensor layers.0.self_attn.v_norm.weight: unexpected",
        ),
        (
            "sepv_nosoftcap_plainconf",
            "layers.0.self_attn.v_proj.weight",
            None,
            r"v_proj.weight: missing, expected shape \[64, 64\]",
        ),
        (
            "sepv_nosoftcap_plainconf",
            "layers.0.self_attn.q_norm.weight",
            (16,),
            r"q_norm.weight: found shape \[16\], expected \[32\]",
        ),
        (
            "sepv_nosoftcap_plainconf",
            "layers.0.mlp.gate_proj.scales",
            (128, 1),
            "tensor layers.0.mlp.gate_proj.scales: unexpected",
        ),
    ],
)
def test_tensors_that_do_not_belong_are_refused_by_name(
    variant: str,
    name: str,
    shape: tuple[int, ...] | None,
    expected: str,
    data_dir: Path,
    target: LoadedTarget,
    tmp_path: Path,
) -> None:
    folder = data_dir / "B_deepspec_gemma4" / variant
    tensors = load_file(folder / "model.safetensors")
    if shape is None:
        del tensors[name]
    else:
        tensors[name] = np.zeros(shape, np.float32)
    with pytest.raises(CheckpointError, match=expected):
        load_draft(
            TinyCheckpoint(config=open_checkpoint(folder).config, tensors=tensors).write(tmp_path), target, jnp.float32
        )
