"""What the Markov chain of a block costs, by size of its tables, dtype and kind of argmax."""

from __future__ import annotations

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.architectures.drafting.block_draft import BlockDraft
from dspark_jax.pipelines.bench.probes import alternating_medians
from dspark_jax.speculators_common.formats.draft_config import DraftConfig, LayerMask
from dspark_jax.speculators_common.formats.rope.config import RopeConfig

SIZES = ((12_288, 48), (49_152, 256))  # draft vocabulary, rank: the demo drafter, a large one
SAMPLERS: dict[str, Any] = {
    "blockwise argmax": None,
    "jnp.argmax": lambda logits, slot: jnp.argmax(logits, axis=-1).astype(jnp.int32),
}


def draft(draft_vocab_size: int, rank: int, num_slots: int, dtype: str) -> BlockDraft:
    """A draft whose chain has real sizes; the network before it is as small as can be and does not run."""
    config = DraftConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        rms_norm_eps=1e-6,
        attention_bias=False,
        vocab_size=49_152,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=8,
        taps=(1,),
        block_size=num_slots,
        sample_from_anchor=True,
        mask_token_id=0,
        markov_rank=rank,
        markov_head_type="vanilla",
        enable_confidence_head=False,
        confidence_head_with_markov=False,
        layers=(LayerMask(),),
        rope=RopeConfig(theta=1e4, rotary_dim=8),
        max_position_embeddings=64,
        architecture="DSparkDraftModel",
        family="speculators",
    )
    return BlockDraft(config, dtype=dtype)


def chain(module: BlockDraft, sampler: Any, rows: int) -> Any:
    """A compiled call of the draft's own chain on fixed base logits."""
    graphdef, state = nnx.split(module)
    leaves, treedef = jax.tree.flatten(state)
    shape = (rows, module.config.block_size, module.config.num_draft_ids)
    base_logits = jax.random.normal(jax.random.key(0), shape, jnp.float32)

    @jax.jit
    def run(leaves: list[Any], base_logits: Any, anchor: Any) -> Any:
        return nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves)).sample_draft_tokens(
            base_logits, anchor, sampler
        )

    return functools.partial(run, leaves, base_logits, jnp.zeros((rows,), jnp.int32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, default=6)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    print(
        f"{args.slots} slots, {args.rows} rows, {jax.default_backend()}: ms, ratio to blockwise argmax in float32 in "
        "brackets"
    )
    print(f"{'vocabulary x rank':<20}{'dtype':<10}" + "".join(f"{name:>20}" for name in SAMPLERS))
    for size in SIZES:
        models = {dtype: draft(*size, args.slots, dtype) for dtype in ("float32", "bfloat16")}
        variants = {
            (dtype, name): chain(model, sampler, args.rows)
            for dtype, model in models.items()
            for name, sampler in SAMPLERS.items()
        }
        medians = alternating_medians(variants, args.repeats)
        for dtype in models:
            cells = (
                f"{medians[dtype, name] * 1e3:.2f} "
                f"({medians[dtype, name] / medians['float32', 'blockwise argmax']:.2f})"
                for name in SAMPLERS
            )
            print(f"{f'{size[0]} x {size[1]}':<20}{dtype:<10}" + "".join(f"{cell:>20}" for cell in cells))


if __name__ == "__main__":
    main()
