"""Writes the results of `dspark generate`: outputs on stdout; choices, figures and warnings on stderr."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import tqdm

from dspark_jax.pipelines.api import GenerationResult, Pipeline, StreamPiece
from dspark_jax.pipelines.bench.comparison import Comparison
from dspark_jax.pipelines.compilation import CompileClock
from dspark_jax.pipelines.sampling.generation import Request
from dspark_jax.pipelines.speculative.completion import TokenLogprobs
from dspark_jax.speculators_common.formats.draft_config import DraftConfig
from dspark_jax.speculators_common.formats.draft_fields import LAYOUT_FLAG

# In the wrong layout the first draft of a round is accepted only by chance. A poor draft in the right layout has a much
# higher rate.
_SUSPICIOUS_ROUNDS, _SUSPICIOUS_RATE = 32, 0.02


_USAGE = (
    "prompt_tokens",
    "completion_tokens",
    "drafted",
    "accepted",
    "drafted_per_position",
    "accepted_per_position",
)


class Writer:
    """Runs requests and writes their outputs in the order of the prompts. `seconds` is the wall time of the run."""

    def __init__(self, pipeline: Pipeline, *, as_json: bool) -> None:
        self._pipeline, self._as_json = pipeline, as_json
        self.seconds = 0.0

    def stream(self, requests: Sequence[Request]) -> list[GenerationResult]:
        """Run the requests one after the other and write text as rounds complete."""
        started = time.perf_counter()
        results: list[GenerationResult] = []
        continuations = 1 + max(request.sample for request in requests)
        for number, request in enumerate(requests):
            if len(requests) > 1:
                prompt = f"prompt {number // continuations + 1} of {len(requests) // continuations}"
                of = f", continuation {request.sample + 1} of {continuations}" if continuations > 1 else ""
                say(prompt + of)
            printer = _Printer(self._pipeline.target.tokenizer is not None)
            for piece in self._pipeline.run([request], stream=True):
                printer(piece)
                results += [] if piece.result is None else [piece.result]
            print(flush=True)
        self.seconds = time.perf_counter() - started
        return results

    def collect(self, requests: Sequence[Request], *, hold: bool) -> list[GenerationResult]:
        """Run the requests together and write each output when all before it are written; with `hold` write nothing."""
        started = time.perf_counter()
        done: dict[int, GenerationResult] = {}
        results: list[GenerationResult] = []
        with tqdm.tqdm(total=len(requests), unit="text", disable=True if len(requests) == 1 else None) as bar:
            for piece in self._pipeline.run(requests):
                if piece.result is None:
                    continue
                done[piece.index] = piece.result
                bar.update()
                while len(results) in done:
                    results.append(done.pop(len(results)))
                    if not hold:
                        self.write(results[-1])
        self.seconds = time.perf_counter() - started
        return results

    def write(self, result: GenerationResult, comparison: Comparison | None = None) -> None:
        """Write one output: its JSON object, or its text, or its ids for a model without tokenizer."""
        text = json.dumps(result_json(result, comparison)) if self._as_json else result.text
        # tqdm keeps its progress bar intact where stdout and stderr are the same terminal.
        tqdm.tqdm.write(_ids(result.output_ids) if text is None else text, file=sys.stdout)
        sys.stdout.flush()


class _Printer:
    """Writes the pieces of one output: text, or ids separated by commas."""

    def __init__(self, has_text: bool) -> None:
        self._has_text, self._separator = has_text, ""

    def __call__(self, piece: StreamPiece) -> None:
        if self._has_text:
            print(piece.text, end="", flush=True)
        elif piece.ids:
            print(self._separator + _ids(piece.ids), end="", flush=True)
            self._separator = ","


def say(*lines: str) -> None:
    """Write lines to stderr."""
    for line in lines:
        print(line, file=sys.stderr)


def result_json(result: GenerationResult, comparison: Comparison | None = None) -> dict[str, Any]:
    """The JSON object of one prompt. Times exclude compilation; `tokens_per_second` excludes the first token."""
    return {
        "prompt_ids": result.prompt_ids,
        "output_ids": result.output_ids,
        "text": result.text,
        "sample": result.sample,
        "seed": result.seed,
        "logprobs": None if result.logprobs is None else _logprobs(result.output_ids, result.logprobs),
        "acceptance": result.acceptance,
        "finish_reason": result.finish_reason,
        "allowed_new_tokens": result.allowed_new_tokens,
        "tau": result.tau,
        "rounds": [one_round._asdict() for one_round in result.rounds],
        "usage": {name: getattr(result, name) for name in _USAGE},
        "non_finite_rounds": result.non_finite_rounds,
        "seconds": result.seconds,
        "first_token_seconds": result.first_token_seconds,
        "tokens_per_second": result.tokens_per_second,
        "compile_seconds": result.compile_seconds,
        **({} if comparison is None else {"comparison": {**dataclasses.asdict(comparison), "ratio": comparison.ratio}}),
    }


def figure_lines(
    results: Sequence[GenerationResult], seconds: float, clock: CompileClock, load_seconds: float
) -> list[str]:
    """Tokens, speed, tau and start-up times. `seconds` is the wall time of all prompts, compilation included."""
    tokens = sum(len(result.output_ids) for result in results)
    rounds = sum(len(result.rounds) for result in results)
    compile_seconds = clock.seconds()
    prompts = sum(result.sample == 0 for result in results)
    if len(results) == 1:
        what = f"{tokens} token{'s' if tokens > 1 else ''} ({results[0].finish_reason})"
        speed = results[0].tokens_per_second
        what += "" if speed is None else f", {speed:.1f} tokens per second after the first"
    else:
        per_second = tokens / max(seconds - compile_seconds, 1e-9)
        what = f"{prompts} prompt{'s' if prompts > 1 else ''}, "
        what += f"{len(results)} continuations, " if len(results) > prompts else ""
        what += f"{tokens} tokens, {per_second:.1f} tokens per second with prompts"
    if rounds:
        tau = sum((result.tau or 0.0) * len(result.rounds) for result in results) / rounds
        what += f", tau {tau:.2f} over {rounds} round{'' if rounds == 1 else 's'}"
    cached = " (from the cache)" if clock.from_cache and not clock.compiled else ""
    start = (
        f"load {load_seconds:.1f} s, compile {compile_seconds:.1f} s{cached}, first token "
        f"{results[0].first_token_seconds:.2f} s"
    )
    return ["", what, start]


def warning_lines(results: Sequence[GenerationResult], draft: DraftConfig | None) -> list[str]:
    """Warnings about states that overflowed, and about a draft that is hardly ever accepted."""
    lines = []
    overflowed = sum(result.non_finite_rounds for result in results)
    if overflowed:
        lines.append(
            f"warning: the draft's states overflowed after {overflowed} rounds; nothing was proposed then (try "
            "--dtype float32)"
        )
    broken = sum(result.finish_reason == "grammar" for result in results)
    if broken:
        lines.append(
            f"warning: {broken} of {len(results)} texts became too complex for the grammar and do not match it"
        )
    offered = [one_round for result in results for one_round in result.rounds if one_round.proposed]
    accepted = sum(one_round.accepted > 0 for one_round in offered)
    if draft is not None and len(offered) >= _SUSPICIOUS_ROUNDS and accepted <= _SUSPICIOUS_RATE * len(offered):
        layout = "anchor-first" if draft.sample_from_anchor else "fill-in"
        lines.append(
            f"warning: the first draft was accepted in {accepted} of {len(offered)} rounds; was this draft trained "
            f"for this target, in the {layout} layout ({LAYOUT_FLAG})?"
        )
    return lines


def _logprobs(ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    return [
        {"id": token, "logprob": one.chosen, "top": [{"id": other, "logprob": value} for other, value in one.top]}
        for token, one in zip(ids, logprobs, strict=True)
    ]


def _ids(ids: Sequence[int]) -> str:
    return ",".join(map(str, ids))
