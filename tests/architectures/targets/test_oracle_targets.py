"""Qwen3 and Llama targets against recorded outputs of transformers: logits, every tap, padded batches, greedy text."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark_jax.architectures.nn.attention.kv_cache import KVCache, KVPages
from dspark_jax.architectures.nn.attention.ragged_batch import PADDING_POSITION, RaggedBatch
from dspark_jax.pipelines.checkpoints.loading import load_target
from dspark_jax.pipelines.speculative.engine import Engine, EngineOptions
from tests.support.requests import request_for

ROWS, LENGTH, PAGE_SIZE, PAGES_PER_ROW = 2, 20, 8, 3
TOLERANCE = 1e-4

pytestmark = pytest.mark.usefixtures("quick_compilation")


@dataclasses.dataclass(frozen=True)
class Case:
    target: Any
    expected: dict[str, np.ndarray]

    def empty_cache(self) -> KVCache:
        pages = KVPages.zeros(self.target.kv_params(PAGE_SIZE), ROWS * PAGES_PER_ROW)
        table = jnp.asarray([[4, 1, 2], [0, 5, 3]], jnp.int32)
        return KVCache(pages=pages, page_table=table, lengths=jnp.zeros((ROWS,), jnp.int32))

    def run(self, batch: RaggedBatch, cache: KVCache | None = None) -> tuple[Any, Any, KVCache]:
        """(final-normed states, all taps stacked on an axis of their own, cache)."""
        taps = tuple(range(self.target.config.num_hidden_layers + 1))
        hidden, tapped, cache = self.target.forward(batch, cache or self.empty_cache(), taps)
        return hidden, tapped.reshape(-1, len(taps), hidden.shape[-1]), cache


@pytest.fixture(scope="module", params=["qwen3_tied", "llama_untied_llama3rope"])
def case(request: pytest.FixtureRequest, data_dir: Path) -> Case:
    folder = data_dir / "E_targets" / request.param
    return Case(load_target(folder, jnp.float32).module, load_file(folder / "expected.safetensors"))


@pytest.fixture(scope="module")
def full_run(case: Case) -> tuple[Any, Any]:
    positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32)[None], (ROWS, LENGTH))
    hidden, taps, _ = case.run(RaggedBatch.rectangle(jnp.asarray(case.expected["input_ids"]), positions))
    return hidden.reshape(ROWS, LENGTH, -1), taps.reshape(ROWS, LENGTH, *taps.shape[1:])


def test_logits_are_the_reference_s(case: Case, full_run: tuple[Any, Any]) -> None:
    np.testing.assert_allclose(case.target.compute_logits(full_run[0]), case.expected["logits"], rtol=0, atol=TOLERANCE)


def test_every_tap_is_the_reference_s_hidden_state(case: Case, full_run: tuple[Any, Any]) -> None:
    """Tap j is hidden state j, except the last: there the reference is normed and the tap is the raw output of the last
    layer.
    """
    hidden, taps = full_run
    last = case.target.config.num_hidden_layers
    for tap in range(last):
        np.testing.assert_allclose(
            taps[:, :, tap], case.expected[f"hidden_states.{tap}"], rtol=0, atol=TOLERANCE, err_msg=f"tap {tap}"
        )
    np.testing.assert_allclose(taps[:, :, last], case.expected["last_layer_raw"], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(hidden, case.expected[f"hidden_states.{last}"], rtol=0, atol=TOLERANCE)
    assert f"hidden_states.{last + 1}" not in case.expected


def test_taps_are_side_by_side_in_the_order_asked_for(case: Case, full_run: tuple[Any, Any]) -> None:
    positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32)[None], (ROWS, LENGTH))
    batch = RaggedBatch.rectangle(jnp.asarray(case.expected["input_ids"]), positions)
    _, tapped, _ = case.target.forward(batch, case.empty_cache(), (0, 1, 3, 5))
    wanted = jnp.concatenate([full_run[1][:, :, tap] for tap in (0, 1, 3, 5)], axis=-1)
    np.testing.assert_array_equal(tapped.reshape(wanted.shape), wanted)


def test_the_last_raw_tap_through_norm_and_head_gives_the_logits(case: Case, full_run: tuple[Any, Any]) -> None:
    """INV-32: what is tapped is the whole residual stream, no term is missing."""
    raw = full_run[1][:, :, -1]
    from_tap = jax.nn.log_softmax(case.target.compute_logits(case.target.norm(raw)), axis=-1)
    np.testing.assert_allclose(
        from_tap, jax.nn.log_softmax(case.target.compute_logits(full_run[0]), axis=-1), rtol=0, atol=1e-6
    )
    np.testing.assert_allclose(
        from_tap, jax.nn.log_softmax(jnp.asarray(case.expected["logits"]), axis=-1), rtol=0, atol=TOLERANCE
    )


@pytest.mark.parametrize("side", ["rightpad", "leftpad"])
def test_padded_batches_give_the_reference_s_logits(case: Case, side: str) -> None:
    real = case.expected[f"{side}.attention_mask"].astype(bool)
    positions = np.where(real, np.cumsum(real, axis=1) - 1, PADDING_POSITION).astype(np.int32)
    if side == "leftpad":
        np.testing.assert_array_equal(positions[real], case.expected["leftpad.position_ids"][real])
    hidden, _, _ = case.run(
        RaggedBatch.rectangle(jnp.asarray(case.expected[f"{side}.input_ids"]), jnp.asarray(positions))
    )
    logits = np.asarray(case.target.compute_logits(hidden)).reshape(ROWS, LENGTH, -1)
    np.testing.assert_allclose(logits[real], case.expected[f"{side}.logits"][real], rtol=0, atol=TOLERANCE)


def test_prompt_and_cached_tokens_in_several_steps_equal_one_forward(case: Case, full_run: tuple[Any, Any]) -> None:
    """Steps of 8, 1 and 11 tokens, in which the surplus of a row of 20 is padding."""
    cache, parts = case.empty_cache(), []
    for start, stop in ((0, 8), (8, 9), (9, 20)):
        count = stop - start
        tokens = np.pad(case.expected["input_ids"][:, start:stop], ((0, 0), (0, LENGTH - count)))
        positions = jnp.asarray([[*range(start, stop), *[PADDING_POSITION] * (LENGTH - count)]] * ROWS, jnp.int32)
        hidden, _, cache = case.run(RaggedBatch.rectangle(jnp.asarray(tokens), positions), cache)
        parts.append(hidden.reshape(ROWS, LENGTH, -1)[:, :count])
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), full_run[0], rtol=0, atol=2e-5)


def test_plain_decoding_gives_the_reference_s_greedy_text(case: Case) -> None:
    options = EngineOptions(
        batch_size=ROWS, max_seq_len=32, page_size=PAGE_SIZE, prefill_chunks=(4,), rounds_per_call=16
    )
    engine = Engine(case.target, None, options)
    prompts = [tuple(row[:4].tolist()) for row in case.expected["input_ids"]]
    completions = engine.generate([request_for(prompt_ids=prompt, max_new_tokens=16) for prompt in prompts])
    for prompt, completion, wanted in zip(prompts, completions, case.expected["greedy_ids"], strict=True):
        assert [*prompt, *completion.output_ids] == wanted.tolist()
        assert completion.finish_reason == "length"
