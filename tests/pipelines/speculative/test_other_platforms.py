"""A round for a TPU or a GPU, traced on a machine with a CPU only: it has that platform's layouts, can be lowered for
it, and gives the same text.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from dspark_jax.architectures.drafting.tables import tables_of
from dspark_jax.architectures.registry import retrieve
from dspark_jax.pipelines.speculative.engine import Engine, EngineOptions
from dspark_jax.pipelines.speculative.state import RoundState
from dspark_jax.pipelines.speculative.step import StepConfig, speculative_step
from dspark_jax.speculators_common.numerics.matmul import OutputMajorKernel, kernel_values
from dspark_jax.speculators_common.numerics.platform import Platform
from tests.support.interpreted_kernels import interpreted_kernels, lowering_for_tpu
from tests.support.random_pairs import random_draft, random_prompts, random_target
from tests.support.requests import request_for
from tests.support.rounds import one_row_state
from tests.support.tiny_checkpoints import TinyCheckpoint, load_pair

NUM_PAGES, PAGE_SIZE, PAGES_PER_ROW = 11, 16, 3
KV_HEADS, HEAD_DIM = 2, 8

pytestmark = pytest.mark.usefixtures("quick_compilation")


def _abstract(checkpoint: TinyCheckpoint, platform: Platform, dtype: Any) -> Any:
    """The module of a checkpoint for `platform`, with shapes instead of arrays."""
    entry = retrieve(checkpoint.config["architectures"][0])
    config = entry.parse_config(checkpoint.config, "config.json", None)
    tables = {} if entry.kind == "target" else {"tables": tables_of(config, checkpoint.tensors.keys())}
    return nnx.eval_shape(lambda: entry.build(config, dtype=dtype, platform=platform, **tables))


def _with_values_of(abstract: Any, module: Any) -> Any:
    """`abstract` with the float32 parameters of `module`, the same model for another platform."""
    graphdef, wanted = nnx.split(abstract)
    given = dict(nnx.to_flat_state(nnx.state(module)))
    filled = []
    for path, parameter in nnx.to_flat_state(wanted):
        values = kernel_values(given[path])
        is_turned = isinstance(parameter, OutputMajorKernel)
        filled.append((path, parameter.replace(values.T if is_turned else values)))
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def _tied_target() -> TinyCheckpoint:
    target = random_target()
    tensors = {name: tensor for name, tensor in target.tensors.items() if name != "lm_head.weight"}
    return TinyCheckpoint(config={**target.config, "tie_word_embeddings": True}, tensors=tensors)


def _traced_round(platform: Platform, dtype: Any) -> tuple[Any, RoundState]:
    """A speculative round of a tied target and a draft, traced for `platform`, and the shapes of its state."""
    target = _abstract(_tied_target(), platform, dtype)
    draft = _abstract(random_draft(markov_rank=6), platform, dtype)
    state = jax.eval_shape(lambda: one_row_state(target, draft, NUM_PAGES, PAGE_SIZE, PAGES_PER_ROW))
    graphdef, modules = nnx.split((target, draft))
    config = StepConfig(num_speculative_tokens=draft.config.max_drafts, num_pages=PAGES_PER_ROW)

    def run(modules: Any, state: RoundState) -> Any:
        return speculative_step(*nnx.merge(graphdef, modules), config)(state, None)

    return jax.jit(run, donate_argnums=1).trace(modules, state), state


@pytest.mark.parametrize("name", ["tpu", "gpu"])
def test_a_round_for_an_accelerator_has_none_of_the_cpu_s_layouts(name: str) -> None:
    traced, state = _traced_round(Platform.of(name), jnp.bfloat16)
    text = str(traced.jaxpr)
    assert "u16[" not in text
    assert "bitcast_convert_type" not in text
    assert state.draft_pages is not None
    for pages in (state.target_pages, state.draft_pages):
        heads = (2 * KV_HEADS * HEAD_DIM,) if name == "tpu" else (2 * KV_HEADS, HEAD_DIM)
        assert {pool.shape for pool in jax.tree.leaves(pages)} == {(NUM_PAGES, PAGE_SIZE, *heads)}
        assert {pool.dtype for pool in jax.tree.leaves(pages)} == {jnp.dtype("bfloat16")}
    with lowering_for_tpu():
        lowered = traced.lower(lowering_platforms=({"tpu": "tpu", "gpu": "cuda"}[name],)).as_text()
    assert ("tpu_custom_call" in lowered) == (name == "tpu")
    assert "ui16" not in lowered
    assert re.search(r"dot_general.*bf16", lowered)


def test_the_same_round_for_a_cpu_has_them() -> None:
    """Control: the CPU program has what the test above must not find."""
    traced, state = _traced_round(Platform.of("cpu"), jnp.bfloat16)
    text = str(traced.jaxpr)
    assert "u16[" in text
    assert "bitcast_convert_type" in text
    assert {pool.shape for pool in jax.tree.leaves(state.target_pages)} == {(NUM_PAGES, KV_HEADS, PAGE_SIZE, HEAD_DIM)}
    assert "ui16" in traced.lower().as_text()


def test_only_a_cpu_keeps_a_copy_of_a_tied_table_and_turned_kernels() -> None:
    kinds = {}
    for name in ("cpu", "tpu", "gpu"):
        target = _abstract(_tied_target(), Platform.of(name), jnp.bfloat16)
        in_float32 = nnx.state(_abstract(_tied_target(), Platform.of(name), jnp.float32))
        parameters = [parameter for _, parameter in nnx.to_flat_state(in_float32)]
        turned = any(isinstance(parameter, OutputMajorKernel) for parameter in parameters)
        kinds[name] = (target.head is not None, turned, target.table.rows.dtype)
    bits, values = jnp.dtype("uint16"), jnp.dtype("bfloat16")
    assert kinds == {"cpu": (True, True, bits), "tpu": (False, False, values), "gpu": (False, False, values)}


def test_a_program_for_a_tpu_gives_the_same_text_on_a_cpu() -> None:
    """In float32 with a tied head: prompts of several lengths, with both drivers; rounds and acceptance are equal."""
    pair = load_pair(_tied_target(), random_draft(markov_rank=6))
    tpu = Platform.of("tpu")
    twins = [
        _with_values_of(_abstract(checkpoint, tpu, jnp.float32), module)
        for checkpoint, module in zip((_tied_target(), random_draft(markov_rank=6)), pair, strict=True)
    ]
    options = EngineOptions(batch_size=2, max_seq_len=40, page_size=8, prefill_chunks=(8,), rounds_per_call=4)
    requests = [request_for(prompt_ids=prompt, max_new_tokens=12) for prompt in random_prompts(3)]
    results = {}
    for name, (target, draft) in {"cpu": pair, "tpu": twins}.items():
        assert (target.platform.name, draft.platform.name) == (name, name)
        with interpreted_kernels(simulated_memory=False):
            engine = Engine(target, draft, options)
            completions = engine.generate(requests)
        assert len(engine.plan.page_buckets) == 1
        results[name] = [(completion.output_ids, completion.rounds) for completion in completions]
    assert results["tpu"] == results["cpu"]
    assert all(len(ids) == 12 for ids, _ in results["cpu"])
