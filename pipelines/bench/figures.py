"""Computes the reported figures of a benchmark from its runs. Uses no clock and no device.

A prompt's first token comes from the prefill and belongs to no round, so decode figures count the tokens after it. Tau
includes the bonus token. The acceptance at a position is the number of accepted drafts / the number of offered drafts
there. The figures of a set are computed over all its rounds, not averaged over its prompts.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from dspark_jax.pipelines.speculative.completion import Completion, reaching
from dspark_jax.pipelines.speculative.sizes import ProposalKind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One prompt, decoded once. In plain decoding every round is (0, 0)."""

    prompt_length: int
    output_ids: tuple[int, ...]
    rounds: tuple[tuple[int, int], ...]  # (proposed, accepted)
    committed: int  # tokens committed by all rounds, including those that the budget cut off
    seconds: float  # from the first token to the last
    first_token_seconds: float  # from the request to the first token

    @classmethod
    def of(cls, completion: Completion) -> Run:
        """The run that a completion describes."""
        return cls(
            prompt_length=len(completion.request.prompt_ids),
            output_ids=tuple(completion.output_ids),
            rounds=tuple(completion.rounds),
            committed=completion.committed,
            seconds=completion.decode_seconds,
            first_token_seconds=completion.prefill_seconds,
        )

    @property
    def decoded(self) -> int:
        """Tokens after the first."""
        return len(self.output_ids) - 1

    def positions(self) -> list[int]:
        """The committed length P at the start of every round."""
        positions, position = [], self.prompt_length
        for _, accepted in self.rounds:
            positions.append(position)
            position += accepted + 1
        return positions


Repeats = Sequence[Run]  # the runs of one prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModeFigures:
    """Figures of one way of decoding over several prompts. Times are sums of the median of each prompt's repeats."""

    tokens: int  # without each prompt's first
    rounds: int
    seconds: float
    tokens_per_second: float
    seconds_per_round: float
    tokens_per_second_with_prefill: float
    first_token_seconds: float  # median over the prompts
    tau: float
    offered: tuple[int, ...]  # drafts verified at each position
    accepted: tuple[int, ...]
    acceptance: tuple[float, ...]  # accepted / offered


def mode_figures(prompts: Sequence[Repeats]) -> ModeFigures:
    """The figures of runs with at least one round in all. Tokens and rounds are those of the first repeat, because all
    repeats give the same tokens.
    """
    firsts = [repeats[0] for repeats in prompts]
    rounds = [pair for run in firsts for pair in run.rounds]
    tokens = sum(run.decoded for run in firsts)
    seconds = sum(_median(repeats, lambda run: run.seconds) for repeats in prompts)
    first_token = [_median(repeats, lambda run: run.first_token_seconds) for repeats in prompts]
    width = max(proposed for proposed, _ in rounds)
    offered = reaching([proposed for proposed, _ in rounds], width)
    accepted = reaching([count for _, count in rounds], width)
    return ModeFigures(
        tokens=tokens,
        rounds=len(rounds),
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        seconds_per_round=seconds / len(rounds),
        tokens_per_second_with_prefill=(tokens + len(firsts)) / (seconds + sum(first_token)),
        first_token_seconds=statistics.median(first_token),
        tau=sum(run.committed for run in firsts) / len(rounds),
        offered=offered,
        accepted=accepted,
        acceptance=tuple(part / whole for part, whole in zip(accepted, offered, strict=True)),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramSeconds:
    """Seconds of the programs timed alone, by page count."""

    plain: Mapping[int, float]  # of a plain step
    round: Mapping[int, float]
    verify: Mapping[int, float]  # of a round without drafting


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageBuckets:
    """The page counts that programs are compiled for. A round runs in the smallest with room for its tokens."""

    counts: tuple[int, ...]  # ascending
    page_size: int

    def of_positions(self, positions: int) -> int:
        """Page count of the program for `positions` cache positions."""
        needed = -(-positions // self.page_size)
        return next((count for count in self.counts if count >= needed), self.counts[-1])

    def of_run(self, run: Run, num_speculative_tokens: int) -> list[int]:
        """Page count of the program of each round."""
        return [self.of_positions(position + num_speculative_tokens + 1) for position in run.positions()]


def mean_seconds(seconds: Mapping[int, float], pages: Iterable[int]) -> float:
    """Mean of `seconds` over rounds whose programs have the page counts `pages`."""
    return statistics.fmean(seconds[count] for count in pages)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SetFigures:
    """Plain against speculative decoding on one prompt set."""

    name: str
    num_prompts: int
    num_speculative_tokens: int
    proposal: ProposalKind
    plain: ModeFigures
    speculative: ModeFigures
    ratio: float  # speculative / plain tokens per second, after the first token
    lowest_ratio: float  # over the repeats
    highest_ratio: float
    prompt_ratios: tuple[float, ...]  # of each prompt that decoded anything, medians over the repeats
    ratio_with_prefill: float
    round_cost: float  # c: a round / a plain step, both timed alone in the same process
    predicted_ratio: float  # tau / c
    deviation: float  # ratio / predicted_ratio - 1
    draft_share: float  # share of drafting in the time of a round: 1 - round without drafting / round
    identical_texts: int
    common_prefix: float  # length of the common prefix / length of the longer text, mean over the prompts


def compare(
    name: str,
    plain: Sequence[Repeats],
    speculative: Sequence[Repeats],
    num_speculative_tokens: int,
    seconds: ProgramSeconds,
    buckets: PageBuckets,
    *,
    proposal: ProposalKind = "argmax",
) -> SetFigures:
    """The figures of one set. `plain` and `speculative` hold the same prompts in the same order, equally often."""
    plain_figures, figures = mode_figures(plain), mode_figures(speculative)
    step_pages = [count for repeats in plain for count in buckets.of_run(repeats[0], 0)]
    round_pages = [count for repeats in speculative for count in buckets.of_run(repeats[0], num_speculative_tokens)]
    round_seconds = mean_seconds(seconds.round, round_pages)
    round_cost = round_seconds / mean_seconds(seconds.plain, step_pages)
    ratio = figures.tokens_per_second / plain_figures.tokens_per_second
    by_repeat = [_speed(speculative, repeat) / _speed(plain, repeat) for repeat in range(len(plain[0]))]
    prefixes = [
        common_prefix(own[0].output_ids, other[0].output_ids) for own, other in zip(plain, speculative, strict=True)
    ]
    return SetFigures(
        name=name,
        num_prompts=len(plain),
        num_speculative_tokens=num_speculative_tokens,
        proposal=proposal,
        plain=plain_figures,
        speculative=figures,
        ratio=ratio,
        lowest_ratio=min(by_repeat),
        highest_ratio=max(by_repeat),
        prompt_ratios=tuple(_prompt_ratios(plain, speculative)),
        ratio_with_prefill=figures.tokens_per_second_with_prefill / plain_figures.tokens_per_second_with_prefill,
        round_cost=round_cost,
        predicted_ratio=figures.tau / round_cost,
        deviation=ratio / (figures.tau / round_cost) - 1,
        draft_share=1 - mean_seconds(seconds.verify, round_pages) / round_seconds,
        identical_texts=sum(prefix == 1 for prefix in prefixes),
        common_prefix=statistics.fmean(prefixes),
    )


def common_prefix(one: Sequence[int], other: Sequence[int]) -> float:
    """Length of the common prefix / length of the longer output; exactly 1 if both are equal."""
    longest = max(len(one), len(other))
    equal = next(
        (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    return equal / longest if longest else 1.0


def _median(repeats: Repeats, value: Callable[[Run], float]) -> float:
    return statistics.median(value(run) for run in repeats)


def _prompt_ratios(plain: Sequence[Repeats], speculative: Sequence[Repeats]) -> Iterator[float]:
    for pair in zip(plain, speculative, strict=True):
        if all(repeats[0].rounds for repeats in pair):
            one, other = (repeats[0].decoded / _median(repeats, lambda run: run.seconds) for repeats in pair)
            yield other / one


def _speed(prompts: Sequence[Repeats], repeat: int) -> float:
    return sum(repeats[repeat].decoded for repeats in prompts) / sum(repeats[repeat].seconds for repeats in prompts)
