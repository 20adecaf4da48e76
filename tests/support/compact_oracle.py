"""The recorded runs of compact drafts, and one round of the paged path on their inputs."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from dspark_jax.architectures import dspark_compact
from dspark_jax.architectures.nn.attention.kv_cache import KVCache, KVPages
from dspark_jax.architectures.nn.attention.ragged_batch import PADDING_POSITION, RaggedBatch
from dspark_jax.speculators_common.formats.compact.format import CompactDims
from tests.support.recorded_tensors import load_recorded

SOFT_CAPS = {"markov": None, "rnn": 6.0, "markov_sts": 11.0}
ROWS, WIDTH, LAYERS, ROUNDS, TARGET_LAYERS = 4, 5, 2, 2, 6
PAGE_SIZE, PAGES_PER_ROW = 4, 6
TOLERANCE = 1e-4


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


def recorded_case(folder: Path) -> Case:
    dims = CompactDims(hidden_size=64, vocab_size=199, rms_norm_eps=1e-6, num_layers=TARGET_LAYERS)
    draft = dspark_compact.load(folder, dims=dims, target_id="tiny-target@64x199")
    expected = load_recorded(folder)
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
    tokens, corrected, _ = draft.draft_chain(base_logits, anchors, hidden=hidden)
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
