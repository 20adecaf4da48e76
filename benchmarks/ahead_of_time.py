"""What does a round for a TPU read, write and need, by the real compiler and without a TPU?

It needs the extra `tpu`. The shapes are those of Qwen3-4B with a draft of five layers; fewer layers compile faster.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from dspark_jax.pipelines.planning.ahead_of_time import COMPILER_ENVIRONMENT, compile_round

TARGET: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151_936,
    "rope_theta": 1e6,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
}
DRAFT: dict[str, Any] = {
    **{name: value for name, value in TARGET.items() if name != "rope_theta"},
    "architectures": ["Qwen3DSparkModel"],
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "tie_word_embeddings": False,
    "block_size": 7,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "mask_token_id": 151_669,
    "num_anchors": 6,
}


def pair(layers: int, draft_layers: int) -> tuple[Any, Any]:
    """The modules for a TPU, with shapes in place of arrays; no draft for 0 layers."""
    import jax.numpy as jnp
    from flax import nnx

    from dspark_jax.architectures.drafting.tables import DraftTables
    from dspark_jax.architectures.registry import retrieve
    from dspark_jax.speculators_common.numerics.platform import Platform

    def module(raw: dict[str, Any], **options: Any) -> Any:
        entry = retrieve(raw["architectures"][0])
        config = entry.parse_config(raw, "config.json", None)
        return nnx.eval_shape(lambda: entry.build(config, dtype=jnp.bfloat16, platform=Platform.of("tpu"), **options))

    target = module({**TARGET, "num_hidden_layers": layers})
    if not draft_layers:
        return target, None
    taps = sorted({round(1 + tap * (layers - 4) / 4) for tap in range(5)}) if layers > 5 else list(range(layers - 1))
    raw = {
        **DRAFT,
        "num_hidden_layers": draft_layers,
        "num_target_layers": layers,
        "target_layer_ids": taps,
        "layer_types": ["full_attention"] * draft_layers,
    }
    return target, module(raw, tables=DraftTables(embed_tokens="own", lm_head="own"))


def main() -> None:
    """Print one line for every batch size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="v6e:2x2", help="v5e:2x2, v6e:2x2, tpu7x:2x2x1; one chip of it is used")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--draft-layers", type=int, default=5)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--program", choices=("round", "loop"), default="round")
    parser.add_argument("--show", type=int, default=0, help="print so many of the largest movements")
    arguments = parser.parse_args()
    os.environ.update(COMPILER_ENVIRONMENT)
    from dspark_jax.pipelines.speculative.sizes import EngineOptions

    target, draft = pair(arguments.layers, arguments.draft_layers)
    layers = f"{arguments.layers} + {arguments.draft_layers} layers"
    print(f"{arguments.topology}, one chip, {layers}, {arguments.context} positions, {arguments.program}")
    print("batch  weights GB  context GB  temporaries MB  moved / bound  compile s")
    for batch in arguments.batch:
        options = EngineOptions(batch_size=batch, max_seq_len=arguments.context)
        started = time.perf_counter()
        found = compile_round(target, draft, options, topology=arguments.topology, program=arguments.program)
        seconds = time.perf_counter() - started
        print(
            f"{batch:5d}  {found.weights / 1e9:10.2f}  {found.context / 1e9:10.2f}  {found.temporaries / 1e6:14.1f}  "
            f"{found.moved / found.bound:13.3f}  {seconds:9.0f}",
            flush=True,
        )
        for one in sorted(found.traffic, key=lambda one: -one.total)[: arguments.show]:
            print(f"    {one.total / 1e6:8.1f} MB  {one.opcode:14} {one.scope[-80:]}")


if __name__ == "__main__":
    main()
