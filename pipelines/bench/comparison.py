"""Compares plain and speculative decoding of one prompt, with the same loaded target in one process.

After a warm-up the two alternate, each with the device loop; with stop strings, with one call per round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dspark_jax.pipelines.api import Pipeline
from dspark_jax.pipelines.bench.figures import ModeFigures, Run, mode_figures
from dspark_jax.pipelines.speculative.engine import Engine, Request
from dspark_jax.speculators_common.errors import RequestError

REPEATS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """The figures of both. Only decoding is timed: no prefill and no compilation."""

    plain: ModeFigures
    speculative: ModeFigures
    plain_speeds: tuple[float, float, float]  # lowest, median and highest tokens per second
    speculative_speeds: tuple[float, float, float]
    num_tokens: int  # of the speculative output, the first token included
    repeats: int
    decoding: str  # how tokens were chosen
    not_compared: str  # why the outputs are not compared; empty if they are
    parts_at: int | None  # index of the first token in which the outputs differ; None if they are equal

    @property
    def ratio(self) -> float:
        """Median speculative speed / median plain speed."""
        return self.speculative.tokens_per_second / self.plain.tokens_per_second


def compare(pipeline: Pipeline, request: Request, *, repeats: int = REPEATS) -> Comparison:
    """Decode `request` both ways, `repeats` times. Raises `RequestError` without a draft, or if no round ran.

    A request that samples must have a seed, as those of `RequestMaker` have: then argmax drafts give the plain text.
    """
    if pipeline.draft is None:
        raise RequestError(
            "found no draft, allowed a pipeline with one", field="compare", allowed="a pipeline with a draft"
        )
    generation = request.generation
    options, not_compared = pipeline.plan.options, ""
    if options.acceptance is not None:
        not_compared = str(options.acceptance)
    elif generation.samples and options.proposal != "argmax":
        not_compared = "drafts drawn at random give another text, of the same distribution"
    engines = {"plain": pipeline.without_draft().engine, "speculative": pipeline.engine}
    for engine in engines.values():
        _decoded(engine, request)  # compiles the programs that this request needs
    runs: dict[str, list[Run]] = {name: [] for name in engines}
    for _ in range(repeats):
        for name, engine in engines.items():
            runs[name].append(_decoded(engine, request))
    plain, speculative = runs["plain"][0].output_ids, runs["speculative"][0].output_ids
    if len(plain) < 2 or len(speculative) < 2:
        raise RequestError(
            "found an output of one token, allowed a longer one: take another prompt or more new tokens",
            field="compare",
            found=speculative,
            allowed="an output of two tokens or more",
        )
    return Comparison(
        plain=mode_figures([runs["plain"]]),
        speculative=mode_figures([runs["speculative"]]),
        plain_speeds=_spread(runs["plain"]),
        speculative_speeds=_spread(runs["speculative"]),
        num_tokens=len(speculative),
        repeats=repeats,
        decoding=f"temperature {generation.temperature:g}, seed {generation.seed}" if generation.samples else "greedy",
        not_compared=not_compared,
        parts_at=None if not_compared else first_difference(plain, speculative),
    )


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first index at which two outputs differ; `None` if they are equal.

    If one output is a prefix of the other, this is the length of the shorter one.
    """
    if one == other:
        return None
    return next(
        (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _decoded(engine: Engine, request: Request) -> Run:
    return Run.of(engine.generate([request])[0])


def _spread(runs: Sequence[Run]) -> tuple[float, float, float]:
    speeds = sorted(run.decoded / run.seconds for run in runs)
    return speeds[0], speeds[len(speeds) // 2], speeds[-1]


def comparison_lines(comparison: Comparison, dtype: str) -> list[str]:
    """The comparison as text: speeds side by side, acceptance by position, and whether the outputs are equal."""
    plain, speculative = comparison.plain, comparison.speculative
    width = len(speculative.offered)
    return [
        f"plain and speculative decoding of the same prompt: {comparison.num_tokens} tokens, "
        f"{comparison.decoding}, {dtype}, {width} drafts per round",
        f"medians of {comparison.repeats} alternating runs in one process (lowest to highest), after the first token, "
        "nothing compiled",
        "",
        _row("", "plain", "speculative"),
        _row(
            "tokens per second",
            f"{plain.tokens_per_second:.1f}",
            f"{speculative.tokens_per_second:.1f}",
            f"{comparison.ratio:.2f} times plain",
        ),
        _row("  lowest to highest", _range(comparison.plain_speeds), _range(comparison.speculative_speeds)),
        _row(
            "milliseconds per token", *(f"{1000 / figures.tokens_per_second:.1f}" for figures in (plain, speculative))
        ),
        _row("target passes", str(plain.rounds), str(speculative.rounds), "after the prompt"),
        _row("tokens per pass (tau)", f"{plain.tau:.2f}", f"{speculative.tau:.2f}", "the target's own token included"),
        "",
        _positions("draft position", [str(position + 1) for position in range(width)]),
        _positions("offered", [str(count) for count in speculative.offered]),
        _positions("accepted", [str(count) for count in speculative.accepted]),
        _positions("accepted of offered", [f"{rate:.0%}" for rate in speculative.acceptance]),
        "",
        _agreement(comparison, dtype),
    ]


def _agreement(comparison: Comparison, dtype: str) -> str:
    if comparison.not_compared:
        return f"outputs are not compared: {comparison.not_compared}"
    if comparison.parts_at is None:
        return "outputs are equal, token for token"
    reason = (
        ""
        if dtype == "float32"
        else f": {dtype} rounds differently when more rows run at once; with --dtype float32 they are equal"
    )
    return f"outputs part at token {comparison.parts_at + 1} of {comparison.num_tokens}{reason}"


def _row(name: str, plain: str, speculative: str, note: str = "") -> str:
    return f"{name:<24}{plain:>20}{speculative:>20}   {note}".rstrip()


def _positions(name: str, cells: Sequence[str]) -> str:
    return f"{name:<24}" + "".join(f"{cell:>8}" for cell in cells)


def _range(speeds: tuple[float, float, float]) -> str:
    return f"{speeds[0]:.1f} to {speeds[2]:.1f}"
