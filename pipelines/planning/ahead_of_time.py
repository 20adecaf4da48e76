"""Compile a round with the real compiler of a TPU on a machine without one, and say what the executable does.

Nothing runs. The compiler comes with the extra `tpu`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies

from dspark_jax.architectures.nn.attention.kv_cache import KVPages
from dspark_jax.architectures.protocols import Draft, Target
from dspark_jax.pipelines.planning.hlo_traffic import Traffic, hbm_traffic
from dspark_jax.pipelines.speculative.programs import Programs
from dspark_jax.pipelines.speculative.sizes import EngineOptions, EnginePlan
from dspark_jax.pipelines.speculative.state import RoundState, empty_rows
from dspark_jax.speculators_common.errors import DSparkError

# jax reads them when it loads the compiler: no queries to the network, no lock against other processes.
COMPILER_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledRound:
    """A round, or a loop over rounds, of one device; all sizes are bytes."""

    weights: int  # arrays of target and draft
    lookup_tables: int  # the part of `weights` that is read by rows
    context: int  # keys and values of full rows
    pages: int  # the page pools
    temporaries: int
    aliased: int  # of the state that is updated in place
    traffic: tuple[Traffic, ...]  # of one round
    text: str  # the optimised HLO

    @property
    def bound(self) -> int:
        """What a round must read: weights and context, each once, and none of the lookup tables."""
        return self.weights - self.lookup_tables + self.context

    @property
    def moved(self) -> int:
        """What a round reads and writes in main memory."""
        return sum(one.total for one in self.traffic)


def compile_round(
    target: Target,
    draft: Draft | None,
    options: EngineOptions,
    *,
    topology: str,
    program: Literal["round", "loop"] = "round",
) -> CompiledRound:
    """Compile a greedy round of `target` and `draft`, which hold shapes in place of arrays, for one chip of a topology.

    Rows have `options.max_seq_len` tokens. `topology` is a name like `v6e:2x2`. Raises `DSparkError` if there is no
    compiler for it, or if the program does not fit.
    """
    mesh = jax.sharding.Mesh(np.asarray(_devices(topology)[:1]), ("device",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def placed(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), tree)

    graphdef, modules = nnx.split((target, draft))
    plan = _plan(target, draft, options)
    programs = Programs(
        *nnx.merge(graphdef, placed(modules)),
        num_speculative_tokens=plan.num_speculative_tokens,
        page_size=options.page_size,
        max_rounds=options.rounds_per_call,
    )
    state = placed(jax.eval_shape(lambda: _state(plan)))
    lower = programs.lower_round if program == "round" else programs.lower_loop
    try:
        with jax.set_mesh(mesh):
            compiled = lower(state, num_pages=plan.pages_per_row, platform="tpu").compile()
    except jax.errors.JaxRuntimeError as error:
        raise DSparkError(f"{topology}: {str(error).splitlines()[0][:200]}") from error
    memory, text = compiled.memory_analysis(), compiled.as_text()
    per_position = plan.kv_bytes // (plan.num_pages * options.page_size)
    return CompiledRound(
        weights=_bytes(modules),
        lookup_tables=_lookup_bytes(target, draft),
        context=options.batch_size * options.max_seq_len * per_position,
        pages=plan.kv_bytes,
        temporaries=memory.temp_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        traffic=tuple(hbm_traffic(text)),
        text=text,
    )


def _devices(topology: str) -> list[Any]:
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    except Exception as error:  # jax raises what its plugin raises: there is no common class
        raise DSparkError(f"topology {topology}: {str(error).splitlines()[0][:200]}") from error


def _plan(target: Target, draft: Draft | None, options: EngineOptions) -> EnginePlan:
    return EnginePlan.of(
        options,
        vocab_size=target.config.vocab_size,
        target_params=target.kv_params(options.page_size),
        draft=None if draft is None else draft.config,
        draft_params=None if draft is None else draft.kv_params(options.page_size),
    )


def _state(plan: EnginePlan) -> RoundState:
    return RoundState(
        target_pages=KVPages.zeros(plan.target_params, plan.num_pages),
        draft_pages=None if plan.draft_params is None else KVPages.zeros(plan.draft_params, plan.num_pages),
        rows=empty_rows(plan.options.batch_size, plan.row_sizes),
    )


def _bytes(tree: Any) -> int:
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def _lookup_bytes(target: Any, draft: Any) -> int:
    """Bytes of embeddings that are not heads too, and of Markov W1."""
    tables = [target.table.rows] if target.head is not None else []
    if draft is not None:
        tables += [draft.table.rows] if draft.has_own_embed_tokens else []
        tables += [] if draft.markov_head is None else [draft.markov_head.w1]
    return _bytes([table.get_value() for table in tables])
