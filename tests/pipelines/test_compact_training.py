"""A compact draft that is trained on the texts of a target is accepted by that target: training and the compiled round
agree.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.architectures import dspark_compact
from dspark_jax.architectures.drafting.taps import tapped_forward
from dspark_jax.architectures.dspark_compact.training_rows import anchor_positions
from dspark_jax.architectures.nn.attention.kv_cache import KVCache, KVPages
from dspark_jax.architectures.nn.attention.ragged_batch import RaggedBatch
from dspark_jax.pipelines.checkpoints.loading import LoadedTarget, load_draft, load_target
from dspark_jax.pipelines.speculative.engine import Completion, Engine, EngineOptions
from tests.support.requests import request_for
from tests.support.tiny_families import BLOCK, COMPACT, HIDDEN, TARGET_ID, VOCAB, tiny_target

NEW_TOKENS, STEPS, LEARNING_RATE = 24, 100, 0.02
_RNG = np.random.default_rng(11)
PROMPTS = tuple(tuple(_RNG.integers(0, VOCAB, 4).tolist()) for _ in range(4))


pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedTarget:
    return load_target(tiny_target().write(tmp_path_factory.mktemp("tiny") / "target"), jnp.float32)


def _completions(target: LoadedTarget, draft: Any) -> list[Completion]:
    engine = Engine(
        target.module,
        draft,
        EngineOptions(max_seq_len=48, batch_size=4, page_size=64, prefill_chunks=(4,), rounds_per_call=8),
    )
    return engine.generate([request_for(prompt_ids=prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS])


def _training_rows(
    target: LoadedTarget, draft: dspark_compact.CompactDraft, texts: list[tuple[int, ...]]
) -> dspark_compact.TrainingRows:
    """Every anchor of the texts, with the taps of one forward over each."""
    ids = np.asarray(texts, np.int32)
    rows, length = ids.shape
    cache = KVCache(
        pages=KVPages.zeros(target.module.kv_params(64), rows),
        page_table=jnp.arange(rows, dtype=jnp.int32)[:, None],
        lengths=jnp.zeros((rows,), jnp.int32),
    )
    batch = RaggedBatch.rectangle(
        jnp.asarray(ids), jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], ids.shape)
    )
    _, taps, _ = tapped_forward(target.module, batch, cache, draft.config.taps)
    return dspark_compact.training_rows(
        list(ids),
        list(np.asarray(taps).reshape(rows, length, -1)),
        [(row, t) for row in range(rows) for t in anchor_positions(length, 4, BLOCK)],
        hidden_size=HIDDEN,
        block_size=BLOCK,
        max_context=length,
    )


def _train(target: LoadedTarget, draft: dspark_compact.CompactDraft, rows: dspark_compact.TrainingRows) -> list[float]:
    """Adam on all anchors at once; returns the losses."""
    module = target.module
    taps, mask, previous, labels = (
        jnp.asarray(x) for x in (rows.context_taps, rows.context_mask, rows.previous, rows.labels)
    )
    embedded, target_logits = (
        module.embed_tokens(previous[:, 0]),
        module.compute_logits(jnp.asarray(rows.target_hidden)),
    )
    graphdef, params = nnx.split(draft, nnx.Param)

    def loss_of(params: Any) -> Any:
        logits, confidence = nnx.merge(graphdef, params).forward_train(taps, mask, embedded, previous, module)
        return dspark_compact.compact_loss(logits, confidence, target_logits, labels).total

    def step(carry: Any, index: Any) -> tuple[Any, Any]:
        params, first, second = carry
        loss, gradients = jax.value_and_grad(loss_of)(params)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, second, gradients)
        count = index.astype(jnp.float32) + 1
        rate = LEARNING_RATE * jnp.sqrt(1 - 0.99**count) / (1 - 0.9**count)
        params = jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), params, first, second)
        return (params, first, second), loss

    zeros = jax.tree.map(jnp.zeros_like, params)
    (params, _, _), losses = jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(STEPS)))((params, zeros, zeros))
    nnx.update(draft, params)
    return [float(loss) for loss in losses]


@pytest.mark.slow
@pytest.mark.parametrize("head", ["markov", pytest.param("rnn", marks=pytest.mark.thorough)])
def test_training_makes_the_target_accept(head: str, target: LoadedTarget, tmp_path: Path) -> None:
    plain = [completion.output_ids for completion in _completions(target, None)]
    settings = dspark_compact.CompactSettings(**{**vars(COMPACT), "sequence_head": head})
    draft = dspark_compact.init(target.module, settings, TARGET_ID, seed=1)
    losses = _train(
        target,
        draft,
        _training_rows(target, draft, [(*prompt, *text) for prompt, text in zip(PROMPTS, plain, strict=True)]),
    )
    assert losses[0] - losses[-1] > 0.5
    dspark_compact.save(draft, tmp_path / "draft")
    completions = _completions(target, load_draft(tmp_path / "draft", target, jnp.float32).module)
    assert [completion.output_ids for completion in completions] == plain
    tau = np.mean([completion.tau for completion in completions])
    assert tau > 3, f"tau {tau:.2f}, losses {losses[0]:.2f} to {losses[-1]:.2f}"
