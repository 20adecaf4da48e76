"""A target beside the recorded outputs of its reference, and the checks that every target family must pass.

A test module of a family defines the fixture `oracle` and a subclass of `TargetChecks`.
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

from dspark_jax.architectures.drafting.tables import DraftTables
from dspark_jax.architectures.dspark_draft.model import DSparkSpeculatorsDraft
from dspark_jax.architectures.nn.attention.kv_cache import KVCache, KVPages
from dspark_jax.architectures.nn.attention.ragged_batch import PADDING_POSITION, RaggedBatch
from dspark_jax.pipelines.checkpoints.loading import LoadedTarget, load_target
from dspark_jax.pipelines.speculative.engine import Completion, Engine, EngineOptions, Request
from dspark_jax.speculators_common.numerics.matmul import set_kernel_values
from tests.support.compilation import ordinary_compilation
from tests.support.recorded_tensors import load_recorded
from tests.support.requests import request_for

ROWS, LENGTH, PROMPT, PAGE_SIZE, PAGES_PER_ROW = 2, 20, 4, 8, 3
TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class TargetOracle:
    """A loaded target and the recorded outputs of its reference. The pages of rows are not in order."""

    loaded: LoadedTarget
    expected: dict[str, np.ndarray]

    @classmethod
    def load(cls, folder: Path) -> TargetOracle:
        """The checkpoint in `folder`, in float32."""
        return cls(load_target(folder, jnp.float32), load_recorded(folder))

    @property
    def target(self) -> Any:
        """The module."""
        return self.loaded.module

    def empty_cache(self) -> KVCache:
        pages = KVPages.zeros(self.target.kv_params(PAGE_SIZE), ROWS * PAGES_PER_ROW)
        table = jnp.asarray([[4, 1, 2], [0, 5, 3]], jnp.int32)
        return KVCache(pages=pages, page_table=table, lengths=jnp.zeros((ROWS,), jnp.int32))

    def run(self, batch: RaggedBatch, cache: KVCache | None = None) -> tuple[Any, Any, KVCache]:
        """(final-normed states, all taps stacked on an axis of their own, cache)."""
        taps = tuple(range(self.target.config.num_hidden_layers + 1))
        hidden, tapped, cache = self.forward(batch, cache or self.empty_cache(), taps)
        return hidden, tapped.reshape(-1, len(taps), hidden.shape[-1]), cache

    @functools.cached_property
    def forward(self) -> Any:
        """The target's `forward` in one program for all batches of a shape."""
        return jax.jit(lambda *given: self.target.forward(*given), static_argnums=2)

    @functools.cached_property
    def full_run(self) -> tuple[Any, Any]:
        """(final-normed states, all taps) of all tokens in one forward."""
        hidden, taps, _ = self.run(self.full_batch())
        return hidden.reshape(ROWS, LENGTH, -1), taps.reshape(ROWS, LENGTH, *taps.shape[1:])

    def full_batch(self) -> RaggedBatch:
        positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32)[None], (ROWS, LENGTH))
        return RaggedBatch.rectangle(jnp.asarray(self.expected["input_ids"]), positions)

    def generate(self, draft: Any, requests: list[Request], *, batch_size: int = ROWS) -> list[Completion]:
        """The completions of an engine with `batch_size` rows."""
        options = EngineOptions(
            batch_size=batch_size, max_seq_len=32, page_size=PAGE_SIZE, prefill_chunks=(4,), rounds_per_call=16
        )
        return Engine(self.target, draft, options).generate(requests)

    @property
    def requests(self) -> list[Request]:
        """The recorded greedy prompts with the recorded length, then a longer prompt: more requests than rows."""
        recorded = [
            request_for(prompt_ids=tuple(row[:PROMPT].tolist()), max_new_tokens=LENGTH - PROMPT)
            for row in self.expected["input_ids"]
        ]
        return [*recorded, request_for(prompt_ids=tuple(self.expected["input_ids"][0, :9].tolist()), max_new_tokens=12)]

    @functools.cached_property
    def plain(self) -> list[Completion]:
        """The results of plain decoding for `requests`."""
        return self.generate(None, self.requests)

    def bigram_draft(self) -> DSparkSpeculatorsDraft:
        """A random draft on borrowed tables whose Markov head knows the recorded text's word pairs: it is right often,
        not always.
        """
        config = self.target.config
        draft = DSparkSpeculatorsDraft(
            hidden_size=config.hidden_size,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size=48,
            rms_norm_eps=1e-6,
            rope_theta=1e4,
            sliding_window=None,
            layer_causal=[False],
            vocab_size=config.vocab_size,
            draft_vocab_size=config.vocab_size,
            markov_rank=config.vocab_size,
            block_size=4,
            sample_from_anchor=True,
            mask_token_id=config.vocab_size - 1,
            num_context_features=3,
            max_seq_len=64,
            taps=(0, 2, config.num_hidden_layers - 1),
            tables=DraftTables(embed_tokens="target", lm_head="target"),
        )
        pairs = np.zeros((config.vocab_size, config.vocab_size), np.float32)
        for row in self.expected["greedy_ids"]:
            pairs[row[:-1], row[1:]] = 100
        assert draft.markov_head is not None
        draft.markov_head.w1[...] = jnp.eye(config.vocab_size)
        set_kernel_values(draft.markov_head.w2.kernel, jnp.asarray(pairs))
        return draft


class TargetChecks:
    """Checks against the records, and of what every target must do."""

    def test_logits_are_the_reference_s(self, oracle: TargetOracle) -> None:
        np.testing.assert_allclose(
            oracle.target.compute_logits(oracle.full_run[0]), oracle.expected["logits"], rtol=0, atol=TOLERANCE
        )

    def test_every_tap_is_the_reference_s_hidden_state(self, oracle: TargetOracle) -> None:
        """Tap j is hidden state j, except the last: there the reference is normed and the tap is the raw output of the
        last layer.
        """
        hidden, taps = oracle.full_run
        last = oracle.target.config.num_hidden_layers
        for tap in range(last):
            np.testing.assert_allclose(
                taps[:, :, tap], oracle.expected[f"hidden_states.{tap}"], rtol=0, atol=TOLERANCE, err_msg=f"tap {tap}"
            )
        np.testing.assert_allclose(taps[:, :, last], oracle.expected["last_layer_raw"], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(hidden, oracle.expected[f"hidden_states.{last}"], rtol=0, atol=TOLERANCE)
        assert f"hidden_states.{last + 1}" not in oracle.expected

    def test_taps_are_side_by_side_in_the_order_asked_for(self, oracle: TargetOracle) -> None:
        _, tapped, _ = oracle.forward(oracle.full_batch(), oracle.empty_cache(), (0, 1, 3, 5))
        wanted = jnp.concatenate([oracle.full_run[1][:, :, tap] for tap in (0, 1, 3, 5)], axis=-1)
        np.testing.assert_array_equal(tapped.reshape(wanted.shape), wanted)

    def test_the_last_raw_tap_through_norm_and_head_gives_the_logits(self, oracle: TargetOracle) -> None:
        """INV-32: what is tapped is the whole residual stream, no term is missing.

        Both sides run operation by operation: one program would round the norm another way than a norm alone.
        """
        target = oracle.target
        last = target.config.num_hidden_layers
        hidden, raw, _ = target.forward(oracle.full_batch(), oracle.empty_cache(), (last,))
        from_tap = jax.nn.log_softmax(target.compute_logits(target.norm(raw)), axis=-1)
        np.testing.assert_allclose(
            from_tap, jax.nn.log_softmax(target.compute_logits(hidden), axis=-1), rtol=0, atol=1e-6
        )
        recorded = jax.nn.log_softmax(jnp.asarray(oracle.expected["logits"]), axis=-1)
        np.testing.assert_allclose(from_tap, recorded.reshape(from_tap.shape), rtol=0, atol=TOLERANCE)

    def test_the_program_that_a_user_runs_gives_the_reference_s_logits(self, oracle: TargetOracle) -> None:
        """One compiled forward with XLA's ordinary optimisation; the other tests compile quickly."""
        with ordinary_compilation():
            run = jax.jit(lambda *given: oracle.target.compute_logits(oracle.target.forward(*given, (0, 1))[0]))
            logits = run(oracle.full_batch(), oracle.empty_cache())
        wanted = oracle.expected["logits"]
        np.testing.assert_allclose(logits.reshape(wanted.shape), wanted, rtol=0, atol=TOLERANCE)

    @pytest.mark.parametrize("side", ["rightpad", "leftpad"])
    def test_padded_batches_give_the_reference_s_logits(self, oracle: TargetOracle, side: str) -> None:
        expected = oracle.expected
        real = expected[f"{side}.attention_mask"].astype(bool)
        positions = np.where(real, np.cumsum(real, axis=1) - 1, PADDING_POSITION).astype(np.int32)
        if side == "leftpad":
            np.testing.assert_array_equal(positions[real], expected["leftpad.position_ids"][real])
        hidden, _, _ = oracle.run(
            RaggedBatch.rectangle(jnp.asarray(expected[f"{side}.input_ids"]), jnp.asarray(positions))
        )
        logits = np.asarray(oracle.target.compute_logits(hidden)).reshape(ROWS, LENGTH, -1)
        np.testing.assert_allclose(logits[real], expected[f"{side}.logits"][real], rtol=0, atol=TOLERANCE)

    def test_prompt_and_cached_tokens_in_several_steps_equal_one_forward(self, oracle: TargetOracle) -> None:
        """Steps of 8, 1 and 11 tokens, in which the surplus of a row of 20 is padding."""
        cache, parts = oracle.empty_cache(), []
        for start, stop in ((0, 8), (8, 9), (9, 20)):
            count = stop - start
            tokens = np.pad(oracle.expected["input_ids"][:, start:stop], ((0, 0), (0, LENGTH - count)))
            positions = jnp.asarray([[*range(start, stop), *[PADDING_POSITION] * (LENGTH - count)]] * ROWS, jnp.int32)
            hidden, _, cache = oracle.run(RaggedBatch.rectangle(jnp.asarray(tokens), positions), cache)
            parts.append(hidden.reshape(ROWS, LENGTH, -1)[:, :count])
        np.testing.assert_allclose(jnp.concatenate(parts, axis=1), oracle.full_run[0], rtol=0, atol=2e-5)

    def test_plain_decoding_gives_the_reference_s_greedy_text(self, oracle: TargetOracle) -> None:
        for completion, wanted in zip(oracle.plain, oracle.expected["greedy_ids"], strict=False):
            assert [*completion.request.prompt_ids, *completion.output_ids] == wanted.tolist()
            assert completion.finish_reason == "length"

    @pytest.mark.thorough
    def test_speculation_in_a_ragged_batch_says_the_same(self, oracle: TargetOracle) -> None:
        """In float32, with a draft on the target's raw tables; some of its drafts are accepted and some are not."""
        speculative = oracle.generate(oracle.bigram_draft(), oracle.requests)
        assert [completion.output_ids for completion in speculative] == [
            completion.output_ids for completion in oracle.plain
        ]
        rounds = [counts for completion in speculative for counts in completion.rounds]
        assert any(accepted for _, accepted in rounds)
        assert any(accepted < proposed for proposed, accepted in rounds)
        assert not any(completion.non_finite_rounds for completion in speculative)
