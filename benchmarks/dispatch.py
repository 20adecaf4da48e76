"""What calling the round costs, by the way in which the model is passed; the project passes flat leaves.

The decoder has as many arrays as a real one but very little arithmetic, so that the host's share of a call dominates.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
from flax import nnx

from dspark_jax.architectures.decoder.dense import DenseDecoder
from dspark_jax.architectures.llama.config import parse_llama
from dspark_jax.architectures.nn.attention.kv_cache import KVPages
from dspark_jax.pipelines.bench.probes import alternating_medians
from dspark_jax.pipelines.speculative.programs import Programs
from dspark_jax.pipelines.speculative.state import RoundState, RowSizes, empty_state
from dspark_jax.pipelines.speculative.step import StepConfig, speculative_step

PAGE_SIZE = 16
CONFIG = StepConfig(num_speculative_tokens=0, num_pages=1)


def tiny_decoder(num_layers: int) -> DenseDecoder:
    """Every array of a real Llama, each of them tiny."""
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_position_embeddings": 64,
    }
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": 16,
    }
    return DenseDecoder(
        parse_llama({**raw, **sizes, "num_hidden_layers": num_layers, "tie_word_embeddings": True}, "tiny")
    )


class Variant:
    """A compiled round and its state. The row is inert, which costs the same as a live one."""

    def __init__(self, target: DenseDecoder, entry: Any) -> None:
        pages = KVPages.zeros(target.kv_params(PAGE_SIZE), 1)
        sizes = RowSizes(pages_per_row=1, num_pages=1, page_size=PAGE_SIZE, num_speculative_tokens=0, num_stop_ids=8)
        self.state: RoundState = empty_state(pages, None, 1, sizes)
        self.entry = entry

    def __call__(self) -> Any:
        self.state, output = self.entry(self.state)
        return self.state, output


def entries(target: DenseDecoder) -> dict[str, Any]:
    """Ways to make the same step a compiled function of the state."""
    programs = Programs(target, None, num_speculative_tokens=0, page_size=PAGE_SIZE, max_rounds=1)
    graphdef, weights = nnx.split(target)

    def of_module(module: DenseDecoder, state: RoundState) -> Any:
        return speculative_step(module, None, CONFIG)(state, None)

    by_state = jax.jit(lambda weights, state: of_module(nnx.merge(graphdef, weights), state), donate_argnums=1)
    by_module: Any = nnx.jit(of_module, donate_argnums=1)
    return {
        "flat leaves (the project's)": lambda state: programs.round(state, num_pages=CONFIG.num_pages),
        # The device loop ends at once when every row is inert: the same arguments, flattened, passed, donated and
        # returned, and nothing computed.
        "flat leaves, no round run": lambda state: programs.loop(
            state, num_pages=CONFIG.num_pages, until_any_finishes=False
        ),
        "jax.jit of an nnx.State": lambda state: by_state(weights, state),
        "nnx.cached_partial(nnx.jit)": nnx.cached_partial(by_module, target),
        "nnx.jit": lambda state: by_module(target, state),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=50)
    args = parser.parse_args()
    target = tiny_decoder(args.layers)
    medians = alternating_medians(
        {name: Variant(target, entry) for name, entry in entries(target).items()}, args.repeats
    )
    arrays = len(jax.tree.leaves(nnx.state(target))) + 2 * args.layers
    first = next(iter(medians.values()))
    print(f"{args.layers} layers, {arrays} arrays, {jax.default_backend()}: microseconds per call")
    for name, seconds in medians.items():
        print(f"{name:<30}{seconds * 1e6:>10.0f}{seconds / first:>8.2f}x")


if __name__ == "__main__":
    main()
