"""What the controls of sampling cost in the decision of a round, by vocabulary and number of rows."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.architectures.proposal import Proposal
from dspark_jax.pipelines.bench.probes import alternating_medians
from dspark_jax.pipelines.sampling.controls import Controls, request_controls
from dspark_jax.pipelines.sampling.generation import Generation
from dspark_jax.pipelines.sampling.logprobs import logprobs_of
from dspark_jax.pipelines.sampling.policy import Policy
from dspark_jax.pipelines.speculative.acceptance import VerifyLogits, decide
from dspark_jax.pipelines.speculative.state import RowSizes, empty_rows
from dspark_jax.speculators_common.numerics.argmax import argmax
from dspark_jax.speculators_common.numerics.platform import default_platform

VOCABULARIES = (49_152, 151_936)
HISTORY, BIASED_IDS = 1024, 320  # tokens of text and ids of a bias
ALL = Generation(
    temperature=0.8,
    top_k=50,
    top_p=0.9,
    min_p=0.02,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias=((5, 1.0),),
    banned_ids=(3,),
    num_logprobs=5,
)
VARIANTS = {
    "greedy": Generation(),
    "temperature": Generation(temperature=0.8),
    "min-p": Generation(temperature=0.8, min_p=0.02),
    "top-k": Generation(temperature=0.8, top_k=50),
    "top-p": Generation(temperature=0.8, top_p=0.9),
    "penalties": Generation(repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1),
    "logprobs": Generation(num_logprobs=5),
    "all": ALL,
}


def decision(generation: Generation, vocab_size: int, rows: int, drafts: int) -> Any:
    """A compiled decision about `drafts` drafts of each row."""
    policy, form = Policy.of(generation), default_platform().argmax
    sizes = RowSizes(
        pages_per_row=1,
        num_pages=rows,
        page_size=HISTORY,
        num_speculative_tokens=drafts,
        num_stop_ids=8,
        num_biased_ids=BIASED_IDS,
    )
    state, random = empty_rows(rows, sizes), np.random.default_rng(0)
    controls: Controls = jax.tree.map(
        lambda leaf: jnp.repeat(leaf, rows, axis=0),
        request_controls(generation, np.zeros((2,), np.uint32), HISTORY // 2, BIASED_IDS),
    )
    history = jnp.asarray(random.integers(0, vocab_size, (rows, HISTORY)), jnp.int32)
    state = dataclasses.replace(state, controls=controls, history=history)
    count = rows * (drafts + 1)
    logits = jnp.asarray(random.normal(0, 3, (count, vocab_size)), jnp.float32)

    def decide_once(logits: Any, state: Any) -> Any:
        places = jnp.arange(count, dtype=jnp.int32)
        verify = VerifyLogits(
            flat=logits,
            index=places.reshape(rows, drafts + 1),
            rows=places // (drafts + 1),
            positions=HISTORY - drafts - 1 + places % (drafts + 1),
        )
        proposal = Proposal(state.history[:, HISTORY - drafts :], jnp.full((rows,), drafts, jnp.int32))
        verdict = decide(proposal, verify, state, policy, functools.partial(argmax, form=form))
        if not policy.logprobs:
            return verdict
        return verdict, logprobs_of(logits, verify.index, jnp.zeros(verify.index.shape, jnp.int32))

    @jax.jit
    def run(logits: Any, state: Any) -> Any:
        """In a loop, as in the device loop: XLA:CPU compiles some operations differently there."""
        outcome = jax.eval_shape(decide_once, logits, state)
        start = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), outcome)
        rounds = state.committed[0] + 1
        return jax.lax.fori_loop(0, rounds, lambda _, last: decide_once(logits, state), start)

    return functools.partial(run, logits, state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    print(f"{args.drafts} drafts, {jax.default_backend()}: ms of a decision")
    print(f"{'vocabulary':<12}{'rows':<6}" + "".join(f"{name:>13}" for name in VARIANTS))
    for vocab_size in VOCABULARIES:
        for rows in args.rows:
            variants = {name: decision(one, vocab_size, rows, args.drafts) for name, one in VARIANTS.items()}
            medians = alternating_medians(variants, args.repeats)
            print(
                f"{vocab_size:<12}{rows:<6}" + "".join(f"{medians[name] * 1e3:>13.2f}" for name in VARIANTS), flush=True
            )


if __name__ == "__main__":
    main()
