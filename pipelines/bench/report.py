"""Formats a benchmark as text and as one JSON object."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dspark_jax.pipelines.bench.benchmark import Benchmark, EngineStart, RoundFigures
from dspark_jax.pipelines.bench.figures import ModeFigures, SetFigures
from dspark_jax.pipelines.bench.options import ALL_SETS
from dspark_jax.pipelines.bench.packed import PackedRounds
from dspark_jax.pipelines.bench.sampled import SampledRounds

_LEGEND = (
    "ratio: speculative / plain tokens per second after the first token, its range over repeats and over prompts; "
    "with prefill: that time included",
    "tau: committed tokens per round, the target's own included; cost: a round / a plain step, both timed alone in "
    "the device loop",
    "deviation: of the ratio from tau/cost; draft share: of a round, against the same round without drafting",
    "same text: common beginning / longer text, mean (equal texts/prompts); acceptance: accepted / offered drafts, by "
    "position",
)


def as_json(benchmark: Benchmark) -> dict[str, Any]:
    """All figures, and the best k over all sets."""
    best = benchmark.best
    return {
        **dataclasses.asdict(benchmark),
        "best_num_speculative_tokens": None if best is None else best.num_speculative_tokens,
    }


def as_text(benchmark: Benchmark) -> str:
    """The benchmark as text: settings, one table per k, and the measurements behind the tables."""
    return "\n".join(_lines(benchmark))


def _lines(benchmark: Benchmark) -> Iterator[str]:
    yield from _settings(benchmark)
    for mode in dict.fromkeys(map(_mode_of, benchmark.sets)):
        yield ""
        yield f"{mode} a round"
        yield from _set_table([figures for figures in benchmark.sets if _mode_of(figures) == mode])
    if not benchmark.sets:
        yield ""
        yield from _plain_table(benchmark.plain)
    else:
        yield ""
        yield from _LEGEND
    yield ""
    yield from (_round_line(figures) for figures in benchmark.rounds)
    yield from (_packed_line(figures) for figures in benchmark.packed)
    yield from (_sampled_line(figures) for figures in benchmark.sampled)
    yield _roofline_line(benchmark)
    yield from _start_lines(benchmark)
    if benchmark.best is not None:
        best = benchmark.best
        gain = f"{best.ratio:.2f}x plain decoding, tau {best.speculative.tau:.2f}"
        yield f"best over all sets: {_mode_of(best)} a round, {gain}"


def _settings(benchmark: Benchmark) -> Iterator[str]:
    settings, machine = benchmark.settings, benchmark.machine
    yield f"target {settings['target']} ({settings['target_architecture']}), {settings['dtype']}"
    if settings["draft"]:
        threshold = settings["confidence_threshold"]
        yield f"draft {settings['draft']} ({settings['draft_architecture']})" + (
            f", confidence threshold {threshold}" if threshold else ""
        )
    count = sum(len(lengths) for lengths in settings["prompts"].values())
    yield (
        f"{settings['sampling']}, batch {settings['batch_size']}, {settings['driver']}; {count} prompts in "
        f"{len(settings['prompts'])} sets, at most {settings['max_new_tokens']} new tokens, medians of "
        f"{settings['repeats']} alternating repeats"
    )
    yield (
        f"{machine.processor}, {machine.cores} cores, {machine.platform} ({machine.device}); "
        f"jax {machine.jax}, Python {machine.python}, dspark-jax {machine.dspark_jax}"
    )


def _set_table(sets: Sequence[SetFigures]) -> Iterator[str]:
    header = [
        "set",
        "plain tok/s",
        "spec tok/s",
        "ratio",
        "repeats",
        "prompts",
        "with prefill",
        "tau",
        "cost",
        "tau/cost",
        "deviation",
        "draft share",
        "same text",
    ]
    rows = [
        [
            figures.name,
            f"{figures.plain.tokens_per_second:.1f}",
            f"{figures.speculative.tokens_per_second:.1f}",
            f"{figures.ratio:.2f}",
            f"{figures.lowest_ratio:.2f}-{figures.highest_ratio:.2f}",
            f"{min(figures.prompt_ratios):.2f}-{max(figures.prompt_ratios):.2f}",
            f"{figures.ratio_with_prefill:.2f}",
            f"{figures.speculative.tau:.2f}",
            f"{figures.round_cost:.2f}",
            f"{figures.predicted_ratio:.2f}",
            f"{figures.deviation:+.0%}",
            f"{figures.draft_share:.0%}",
            f"{figures.common_prefix:.2f} ({figures.identical_texts}/{figures.num_prompts})",
            " ".join(f"{rate:.2f}" for rate in figures.speculative.acceptance),
        ]
        for figures in sets
    ]
    return _aligned([[*header, "acceptance"], *rows], left={0, len(header)})


def _plain_table(plain: Mapping[str, ModeFigures]) -> Iterator[str]:
    rows = [
        [
            name,
            f"{figures.tokens_per_second:.1f}",
            f"{figures.tokens_per_second_with_prefill:.1f}",
            f"{figures.first_token_seconds * 1e3:.0f} ms",
        ]
        for name, figures in plain.items()
    ]
    return _aligned([["set", "plain tok/s", "with prefill", "first token"], *rows], left={0})


def _aligned(rows: Sequence[Sequence[str]], left: set[int]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def _round_line(figures: RoundFigures) -> str:
    return (
        f"{_mode_of(figures)}: round {_ms(figures.round_seconds)} (verify "
        f"{_ms(figures.verify_seconds)}), plain step {_ms(figures.plain_step_seconds)} in the device loop; one call a "
        f"round {_ms(figures.stream_seconds)}, of it host {_ms(figures.host_seconds)} = {figures.host_share:.1%}"
    )


def _packed_line(packed: PackedRounds) -> str:
    rounds = [
        f"{tokens} tokens {_ms(seconds)} ({relative:.2f})"
        for tokens, seconds, relative in zip(packed.num_tokens, packed.seconds, packed.relative, strict=True)
    ]
    return (
        f"{_mode(packed.num_speculative_tokens)}, {packed.num_rows} rows: {packed.offered:.0%} of the drafts offered "
        f"at the threshold; a round with a flat batch of {', '.join(rounds)}"
    )


def _roofline_line(benchmark: Benchmark) -> str:
    roofline, plain = benchmark.roofline, benchmark.plain[ALL_SETS]
    bandwidth = f"{roofline.bytes_per_second / 1e9:.1f} GB/s (median; best {roofline.best_bytes_per_second / 1e9:.1f})"
    return (
        f"plain step {_ms(plain.seconds_per_round)}; roofline {roofline.weight_bytes / 1e6:.0f} MB / {bandwidth} = "
        f"{_ms(roofline.seconds)}: {roofline.reached:.0%} reached"
    )


def _start_lines(benchmark: Benchmark) -> Iterator[str]:
    loaded = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in benchmark.load_seconds.items())
    yield f"load: {loaded or 'not timed'}; " + "; ".join(_start(start) for start in benchmark.starts)
    firsts = [("plain", benchmark.plain[ALL_SETS])]
    firsts += [(_mode_of(figures), figures.speculative) for figures in benchmark.sets if figures.name == ALL_SETS]
    prompts = ", ".join(f"{mode} {_ms(figures.first_token_seconds)}" for mode, figures in firsts)
    start = f"{benchmark.start_to_first_token_seconds:.1f} s from the start of loading"
    yield f"to the first token: {start}; when warm (median prompt) {prompts}"


def _start(start: EngineStart) -> str:
    executables = start.from_cache + start.compiled
    source = f"{start.from_cache} of {executables} executables from the cache" if executables else "no cache"
    return (
        f"{_mode_of(start)} ready after {start.seconds:.1f} s, {start.compile_seconds:.1f} s of it compiling ({source})"
    )


def _sampled_line(figures: SampledRounds) -> str:
    rounds = [
        f"{rows} row{'s' if rows > 1 else ''} {_ms(seconds)} ({figures.ratio(rows):.2f} of a greedy round)"
        for rows, seconds in figures.sampled.items()
    ]
    return f"{_mode_of(figures)}, a round with these controls: {', '.join(rounds)}"


def _mode(k: int) -> str:
    return "plain" if not k else f"{k} draft{'s' if k > 1 else ''}"


def _mode_of(figures: SetFigures | RoundFigures | EngineStart | SampledRounds) -> str:
    k = figures.num_speculative_tokens
    return _mode(k) if figures.proposal == "argmax" else _mode(k).replace(" ", f" {figures.proposal} ")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.{1 if seconds >= 1e-3 else 2}f} ms"
