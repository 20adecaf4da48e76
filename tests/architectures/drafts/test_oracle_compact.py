"""The compact draft against recorded numbers: two rounds of four ragged rows, every pruning rule, training, loss and
gradients.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import Array, Float, Int32
from safetensors.numpy import load_file

from dspark_jax.architectures import dspark_compact
from dspark_jax.architectures.dspark_compact.model import effective_thresholds
from dspark_jax.architectures.dspark_compact.weights import parameter_path
from dspark_jax.architectures.nn.attention.kv_cache import KVCache, KVPages
from dspark_jax.architectures.nn.attention.ragged_batch import PADDING_POSITION, RaggedBatch
from dspark_jax.speculators_common.formats.compact.format import CompactDims, tensor_shapes
from dspark_jax.speculators_common.heads.confidence_head import confident_length_after_first
from tests.support.compilation import ordinary_compilation

SOFT_CAPS = {"markov": None, "rnn": 6.0, "markov_sts": 11.0}
ROWS, WIDTH, LAYERS, ROUNDS, TARGET_LAYERS = 4, 5, 2, 2, 6
PAGE_SIZE, PAGES_PER_ROW = 4, 6
TOLERANCE = 1e-4
# name -> (thresholds, minimum confidence, steps), in the recorded order
CASES: dict[str, tuple[list[float] | None, float | None, int]] = {
    "off": (None, None, 5),
    "empty_list": ([], None, 5),
    "zeros": ([0.0] * 5, None, 5),
    "ones": ([1.0] * 5, None, 5),
    "first_only": ([1.0, 0.0, 0.0, 0.0, 0.0], None, 5),
    "rising": ([0.0, 0.3, 0.4, 0.5, 0.6], None, 5),
    "uneven": ([0.9, 0.5, 0.1, 0.7, 0.2], None, 5),
    "min_conf": (None, 0.5, 5),
    "short_list": ([0.0, 0.35], None, 5),
    "short_list_min_conf": ([0.0, 0.35], 0.6, 5),
    "list_beats_min_conf": ([0.0, 0.2, 0.2, 0.2, 0.2], 0.95, 5),
    "fewer_steps": ([0.0, 0.3, 0.4, 0.5, 0.6], None, 3),
}

pytestmark = pytest.mark.usefixtures("quick_compilation")


class Tables:
    """The recorded tables of the target: untied, or tied where both are equal."""

    def __init__(self, embedding: Any, head: Any, soft_cap: float | None) -> None:
        self.embedding, self.head, self.soft_cap = jnp.asarray(embedding), jnp.asarray(head), soft_cap

    def embed_tokens(self, ids: Int32[Array, "*axes"]) -> Float[Array, "*axes H"]:
        return self.embedding[ids]

    def lm_head(self, hidden: Float[Array, "*axes H"]) -> Float[Array, "*axes V"]:
        return hidden @ self.head.T

    def compute_logits(self, hidden: Float[Array, "*axes H"]) -> Float[Array, "*axes V"]:
        logits = self.lm_head(hidden)
        return logits if self.soft_cap is None else self.soft_cap * jnp.tanh(logits / self.soft_cap)


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    draft: dspark_compact.CompactDraft
    tables: Tables
    expected: dict[str, np.ndarray]
    rounds: list[dict[str, Any]]

    def row(self, index: int, row: int, name: str) -> np.ndarray:
        return self.expected[f"r{index}.row{row}.{name}"]

    def assert_rows_close(self, name: str) -> None:
        """Our `name` of every row of every round is the recorded one; places beyond a row's own mean nothing."""
        for index in range(ROUNDS):
            for row in range(ROWS):
                wanted = self.row(index, row, name)
                ours = np.asarray(self.rounds[index][name][row])
                ours = ours[tuple(slice(0, size) for size in wanted.shape)]
                np.testing.assert_allclose(ours, wanted, rtol=0, atol=TOLERANCE, err_msg=f"round {index}, row {row}")


@pytest.fixture(scope="module", params=list(SOFT_CAPS))
def case(request: pytest.FixtureRequest, data_dir: Path) -> Case:
    return _case(data_dir / "H_compact" / request.param)


def _case(folder: Path) -> Case:
    dims = CompactDims(hidden_size=64, vocab_size=199, rms_norm_eps=1e-6, num_layers=TARGET_LAYERS)
    draft = dspark_compact.load(folder, dims=dims, target_id="tiny-target@64x199")
    expected = load_file(folder / "expected.safetensors")
    tables = Tables(expected["target.embed"], expected["target.lm_head"], SOFT_CAPS[folder.name])
    one_round = jax.jit(functools.partial(_one_round, draft, tables))
    cache = KVCache(
        pages=KVPages.zeros(draft.kv_params(PAGE_SIZE), ROWS * PAGES_PER_ROW),
        page_table=jnp.asarray(np.random.default_rng(0).permutation(ROWS * PAGES_PER_ROW).reshape(ROWS, -1), jnp.int32),
        lengths=jnp.zeros((ROWS,), jnp.int32),
    )
    rounds = []
    for index in range(ROUNDS):
        counts, lengths = expected[f"r{index}.num_new_context"], expected[f"r{index}.context_lengths"]
        taps = np.full((ROWS, counts.max(), 3 * 64), 1e3, np.float32)
        positions = np.full((ROWS, counts.max()), PADDING_POSITION, np.int32)
        for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            taps[row, :count] = expected[f"r{index}.row{row}.context_taps"]
            positions[row, :count] = range(length - count, length)
        cache, results = one_round(cache, taps, positions, lengths, expected[f"r{index}.anchors"])
        rounds.append(results)
    return Case(folder.name, draft, tables, expected, rounds)


def _one_round(
    draft: Any, tables: Tables, cache: KVCache, taps: Any, positions: Any, lengths: Any, anchors: Any
) -> tuple[KVCache, dict[str, Any]]:
    """A round over one paged cache, by the methods that the compiled round calls."""
    context = draft.project_target_hidden(taps)
    batch = RaggedBatch.rectangle(jnp.zeros_like(positions), positions)
    cache = dataclasses.replace(draft.materialize_kv(batch.to_flat(context), batch, cache), lengths=lengths)
    embeds = draft.embed_block(anchors, tables)
    hidden = draft.forward_block(embeds, cache)
    base_logits = draft.compute_logits(hidden, tables)
    tokens, corrected = draft.draft_chain(base_logits, anchors, hidden=hidden)
    confidence = draft.predict_confidence(hidden, anchors, tokens)
    results = {
        "context_feature": context,
        "block_input": embeds,
        "block_hidden": hidden,
        "base_logits": base_logits,
        "sampled_tokens": tokens,
        "corrected_logits": corrected,
        "confidence_logits": confidence,
        "confidence": jax.nn.sigmoid(confidence),
    }
    x = embeds
    for number, layer in enumerate(draft.layers):
        keys, values = cache.read(number)
        own_keys, own_values = layer.context_keys_values(x)
        x = layer(x, cache, WIDTH)
        found = {
            "k_ctx": keys,
            "v_ctx": values,
            "k_block": own_keys.swapaxes(1, 2),
            "v_block": own_values.swapaxes(1, 2),
            "out": x,
        }
        results |= {f"layer{number}.{name}": value for name, value in found.items()}
    return cache, results


def test_the_files_say_what_the_draft_is(case: Case) -> None:
    config = case.draft.config
    assert config.taps == (3, 5, "final")
    assert config.markov_head_type == ("tanh_rnn" if case.name == "rnn" else "vanilla")
    assert (
        config.max_drafts,
        config.num_hidden_layers,
        config.head_dim,
        config.rope.rotary_dim,
        config.mask_token_id,
    ) == (5, 2, 8, 0, None)
    assert (config.thresholds is None) == (case.name != "markov_sts")


def test_taps_are_the_recorded_states_that_the_config_names(case: Case) -> None:
    """Tap j is hidden state j of the target, and `"final"` the last one, after the final norm."""
    for index in range(ROUNDS):
        for row in range(ROWS):
            states = case.row(index, row, "target_hidden_all")
            assert len(states) == TARGET_LAYERS + 1
            wanted = np.concatenate([states[-1 if tap == "final" else tap] for tap in case.draft.config.taps], axis=-1)
            np.testing.assert_array_equal(case.row(index, row, "context_taps"), wanted)


def test_context_features_are_the_recorded_ones(case: Case) -> None:
    case.assert_rows_close("context_feature")


def test_the_cache_holds_the_recorded_context_over_both_rounds(case: Case) -> None:
    for layer in range(LAYERS):
        case.assert_rows_close(f"layer{layer}.k_ctx")
        case.assert_rows_close(f"layer{layer}.v_ctx")


def test_the_block_is_embedded_and_run_as_recorded(case: Case) -> None:
    case.assert_rows_close("block_input")
    for layer in range(LAYERS):
        for name in ("k_block", "v_block", "out"):
            case.assert_rows_close(f"layer{layer}.{name}")
    case.assert_rows_close("block_hidden")


def test_logits_are_the_recorded_ones_before_and_after_the_sequence_head(case: Case) -> None:
    case.assert_rows_close("base_logits")
    case.assert_rows_close("corrected_logits")


@pytest.mark.parametrize("name", ["markov", "rnn"])
def test_the_round_that_a_user_runs_gives_the_recorded_values(name: str, data_dir: Path) -> None:
    """XLA's ordinary optimisation; the other tests compile quickly."""
    with ordinary_compilation():
        ordinary = _case(data_dir / "H_compact" / name)
    for value in ("layer1.k_ctx", "layer1.out", "base_logits", "corrected_logits", "confidence_logits"):
        ordinary.assert_rows_close(value)
    for index in range(ROUNDS):
        wanted = [ordinary.row(index, row, "sampled_tokens").tolist() for row in range(ROWS)]
        assert ordinary.rounds[index]["sampled_tokens"].tolist() == wanted


def test_greedy_drafts_are_exactly_the_recorded_ones(case: Case) -> None:
    for index in range(ROUNDS):
        wanted = [case.row(index, row, "sampled_tokens").tolist() for row in range(ROWS)]
        assert case.rounds[index]["sampled_tokens"].tolist() == wanted


def test_confidences_are_the_recorded_ones(case: Case) -> None:
    case.assert_rows_close("confidence_logits")
    case.assert_rows_close("confidence")


def test_every_pruning_rule_keeps_the_recorded_number_of_drafts(case: Case) -> None:
    cases = {**CASES, "stored_sts": ([0.0, 0.15, 0.6, 0.3, 0.7], None, 5)} if case.name == "markov_sts" else CASES
    recorded = list(zip(case.expected["prune.thresholds"], case.expected["prune.steps"], strict=True))
    assert len(recorded) == len(cases)
    for number, (thresholds, min_confidence, steps) in enumerate(cases.values()):
        np.testing.assert_array_equal(effective_thresholds(thresholds, min_confidence, WIDTH), recorded[number][0])
        assert steps == recorded[number][1]
    for index in range(ROUNDS):
        for number, (name, (_, _, steps)) in enumerate(cases.items()):
            limits = jnp.broadcast_to(jnp.asarray(recorded[number][0][:steps])[None], (ROWS, steps))
            lengths = confident_length_after_first(case.rounds[index]["confidence_logits"][:, :steps], limits)
            assert lengths.tolist() == case.expected[f"r{index}.proposal_length"][number].tolist(), name


@pytest.mark.parametrize("name", ["off", "short_list_min_conf", "fewer_steps"])
def test_rows_are_drafted_under_the_options_of_the_call(case: Case, name: str) -> None:
    thresholds, min_confidence, steps = CASES[name]
    rows = _rows(case, 1, thresholds=thresholds, min_confidence=min_confidence, num_steps=steps)
    assert rows.lengths.tolist() == case.expected["r1.proposal_length"][list(CASES).index(name)].tolist()
    assert rows.tokens.tolist() == case.rounds[1]["sampled_tokens"][:, :steps].tolist()


def test_without_options_the_stored_thresholds_decide(case: Case) -> None:
    by_default = len(CASES) if case.name == "markov_sts" else 0
    for index in range(ROUNDS):
        wanted = case.expected[f"r{index}.proposal_length"][by_default].tolist()
        assert _rows(case, index).lengths.tolist() == wanted
        no_wish = jnp.zeros((ROWS,), jnp.float32)
        assert case.draft.proposal_length(case.rounds[index]["confidence_logits"], no_wish).tolist() == wanted


def test_the_threshold_of_a_request_holds_for_its_row_alone(case: Case) -> None:
    """Row by row: 0.5 as in the recorded case, everything, the stored ones, nothing but slot 0."""
    recorded = case.expected["r0.proposal_length"]
    by_default, minimum = len(CASES) if case.name == "markov_sts" else 0, list(CASES).index("min_conf")
    lengths = case.draft.proposal_length(
        case.rounds[0]["confidence_logits"], jnp.asarray([0.5, 1e-9, 0.0, 1.0], jnp.float32)
    )
    assert lengths.tolist() == [recorded[minimum, 0], WIDTH, recorded[by_default, 2], 1]


def test_dense_rows_give_what_the_paged_cache_gives(case: Case) -> None:
    for index in range(ROUNDS):
        rows = _rows(case, index)
        for row in range(ROWS):
            np.testing.assert_allclose(
                rows.base_logits[row], case.row(index, row, "base_logits"), rtol=0, atol=TOLERANCE
            )
            np.testing.assert_allclose(
                rows.confidences[row], case.row(index, row, "confidence"), rtol=0, atol=TOLERANCE
            )


def test_a_row_does_not_depend_on_its_neighbours_nor_on_the_order_of_its_context(case: Case) -> None:
    taps = case.expected["r0.row1.context_taps"]
    shuffled = jnp.asarray(np.random.default_rng(1).permutation(taps)[None])
    alone = case.draft.forward_rows(
        case.draft.project_context_rows(shuffled),
        jnp.asarray([12], jnp.int32),
        jnp.asarray(case.expected["r0.anchors"][1:2]),
        case.tables,
    )
    assert alone.tokens[0].tolist() == case.row(0, 1, "sampled_tokens").tolist()
    np.testing.assert_allclose(alone.base_logits[0], case.row(0, 1, "base_logits"), rtol=0, atol=TOLERANCE)


def _rows(case: Case, index: int, **options: Any) -> Any:
    """`forward_rows` over the whole context of every row, lines padded with rows that must not be seen."""
    lengths = case.expected[f"r{index}.context_lengths"]
    lines = np.full((ROWS, lengths.max(), 3 * 64), 7, np.float32)
    for row, length in enumerate(lengths):
        lines[row, :length] = np.concatenate([case.row(earlier, row, "context_taps") for earlier in range(index + 1)])
    context_kv = case.draft.project_context_rows(jnp.asarray(lines))
    return case.draft.forward_rows(
        context_kv, jnp.asarray(lengths), jnp.asarray(case.expected[f"r{index}.anchors"]), case.tables, **options
    )


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
    """The last context row of every anchor is the state at t - 1; the state at t, which would give the first label
    away, is in none.
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
    """Training forward, loss and gradients on the recorded batch, whose padding holds junk."""
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
    _, corrected = case.draft.draft_chain(base_logits, previous[:, 0], lambda logits, slot: labels[:, slot])
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
