"""Results of programs: waits for them, and writes them into the completions of their requests."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

import jax
import numpy as np

from dspark_jax.pipelines.sampling.logprobs import Logprobs
from dspark_jax.pipelines.speculative.completion import TokenLogprobs
from dspark_jax.pipelines.speculative.loop import LoopOutput
from dspark_jax.pipelines.speculative.scheduler import Job
from dspark_jax.pipelines.speculative.state import NO_TOKEN, RoundOutput


@dataclasses.dataclass(frozen=True, kw_only=True)
class PendingProgram:
    """A program that was started and whose results were not read yet. `jobs` maps rows of the output to their jobs."""

    output: RoundOutput | LoopOutput
    jobs: Mapping[int, Job]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowResults:
    """What a program reported about one row."""

    job: Job
    tokens: list[int]
    rounds: list[tuple[int, int]]  # (proposed, accepted) drafts
    non_finite: int
    next_length: int
    drafts: tuple[int, ...]  # for the next round; empty where the policy has no masks
    logprobs: list[TokenLogprobs]  # of `tokens`; empty where the request wants none


def read_results(pending: PendingProgram) -> list[RowResults]:
    """Wait for the results of a program; returns those of the rows whose request has not ended."""
    host = jax.device_get(pending.output)
    if isinstance(host, LoopOutput):
        counts, proposed, accepted = host.num_rounds, host.proposed, host.accepted
    else:
        counts = host.is_round.astype(np.int32)
        proposed, accepted = host.proposed[:, None], host.accepted[:, None]
    results = []
    for row, job in pending.jobs.items():
        if job.completion.finish_reason is None:
            rounds = zip(proposed[row, : counts[row]].tolist(), accepted[row, : counts[row]].tolist(), strict=True)
            is_token = host.tokens[row] != NO_TOKEN
            results.append(
                RowResults(
                    job=job,
                    tokens=host.tokens[row][is_token].tolist(),
                    rounds=list(rounds),
                    non_finite=int(host.non_finite[row]),
                    next_length=int(host.next_length[row]),
                    drafts=_drafts(host, row),
                    logprobs=_logprobs(host.logprobs, row, is_token, job.request.generation.num_logprobs),
                )
            )
    return results


def record(results: RowResults) -> RowResults:
    """Add the results to the job and its completion, and set the finish reason if the request has ended.

    Returns the results, cut where the host ends the text: by the request's watch or its grammar.
    """
    job, now = results.job, time.perf_counter()
    end = _end(job, results.tokens)
    if end is not None:
        results = _cut(results, end)
    completion = job.completion
    if results.tokens and not job.first_token_at:
        job.first_token_at = now
        completion.prefill_seconds = now - job.admitted_at
    job.drafts, job.next_length = results.drafts, results.next_length
    job.num_emitted += len(results.tokens)
    completion.output_ids += results.tokens
    completion.logprobs += results.logprobs
    completion.rounds += results.rounds
    completion.non_finite_rounds += results.non_finite
    completion.decode_seconds = now - job.first_token_at if job.first_token_at else 0.0
    if end is not None or (completion.output_ids and completion.output_ids[-1] in completion.request.stop_ids):
        completion.finish_reason = "grammar" if job.continuations and job.continuations.is_broken else "stop"
    elif job.remaining <= 0:
        completion.finish_reason = "length"
    return results


def _end(job: Job, tokens: list[int]) -> int | None:
    """How many of the new tokens belong to the text, if the host ends it within them."""
    if not tokens:
        return None
    ends = [
        None if job.continuations is None else job.continuations.advance(tokens),
        None if job.watch is None else job.watch.push(tokens),
    ]
    return min((end for end in ends if end is not None), default=None)


def _drafts(output: RoundOutput | LoopOutput, row: int) -> tuple[int, ...]:
    if isinstance(output, LoopOutput) or output.drafts is None:
        return ()
    return tuple(np.asarray(output.drafts[row]).tolist())


def _cut(results: RowResults, length: int) -> RowResults:
    """The results as if the last of the first `length` tokens had been a stop token.

    Later rounds did not happen, and neither did a round that is left without tokens. In the round of the last token the
    figures are those of a stop token: among accepted drafts it cuts both, as the next token it cuts nothing. Tokens
    without a round are the first of a prompt.
    """
    rounds, left = [], length
    for proposed, accepted in results.rounds:
        if left > 0:
            rounds.append((left, left) if left <= accepted else (proposed, accepted))
        left -= accepted + 1
    return dataclasses.replace(
        results, tokens=results.tokens[:length], logprobs=results.logprobs[:length], rounds=rounds
    )


def _logprobs(found: Logprobs | None, row: int, is_token: np.ndarray, wanted: int | None) -> list[TokenLogprobs]:
    if found is None or wanted is None:
        return []
    chosen, ids, top = (np.asarray(values[row])[is_token] for values in found)
    return [
        TokenLogprobs(float(one), tuple(zip(most[:wanted].tolist(), values[:wanted].tolist(), strict=True)))
        for one, most, values in zip(chosen, ids, top, strict=True)
    ]
