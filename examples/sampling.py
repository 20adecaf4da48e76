"""Sample with a draft: seeds, several continuations, log-probabilities, and a stream that is cut short.

Run it: `python examples/sampling.py [TARGET DRAFT]`. The default is the random pair of the tests, whose texts mean
nothing. It has no tokenizer, so the prompt is a list of token ids. With a tokenizer it can be a text, and
`stop_strings=["..."]` ends the output at a text.
"""

import contextlib
import sys
from pathlib import Path

import dspark_jax

PAIR = Path(__file__).parents[1] / "tests" / "data" / "D_loop"


def main(target: Path | str = PAIR / "target", draft: Path | str = PAIR / "draft") -> None:
    pipeline = dspark_jax.load(target, draft, dtype="float32", max_seq_len=64)
    options = dspark_jax.Generation(max_new_tokens=24, temperature=0.8, top_p=0.95, num_logprobs=2)

    # Without a seed one is drawn, and the results tell it. Continuations of a prompt differ in `sample`.
    results = pipeline.generate([5, 17, 3], options, n=3)
    for result in results:
        print(f"seed {result.seed}, continuation {result.sample}: {result.output_ids[:8]} ...")
        print(f"  {result.accepted} of {result.drafted} drafts accepted, tau {result.tau:.2f}")

    # Drafts change the speed and not the text: plain decoding with the same seed says the same.
    plain = pipeline.without_draft().generate([5, 17, 3], options, n=3, seed=results[0].seed)
    same = [one.output_ids for one in plain] == [one.output_ids for one in results]
    print(f"equal to plain decoding: {same}")

    # Log-probabilities are those of the model, before temperature and filters.
    first = results[0].logprobs[0]
    print(f"first token {results[0].output_ids[0]}: {first.chosen:.2f}; most probable {first.top[0]}")

    # Pieces arrive as rounds complete. Closing the stream cancels the request and frees its row.
    with contextlib.closing(pipeline.stream([5, 17, 3], options, seed=results[0].seed)) as pieces:
        told = [*next(pieces).ids, *next(pieces).ids]
    print(f"streamed {tuple(told)}, then cancelled; rows in use: {pipeline.engine.num_running}")
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main(*sys.argv[1:3])
