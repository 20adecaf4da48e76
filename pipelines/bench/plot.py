"""Draws a benchmark."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from dspark_jax.pipelines.bench.benchmark import Benchmark
from dspark_jax.pipelines.bench.figures import SetFigures
from dspark_jax.pipelines.bench.options import ALL_SETS
from dspark_jax.speculators_common.errors import DSparkError, install_hint

_SUFFIXES = (".png", ".svg", ".pdf")
_PLAIN, _SPECULATIVE, _PREDICTED, _INK, _FAINT = "#b9c0ca", "#2c6fb7", "#f2a33a", "#22262b", "#6b7280"
_BAR = 0.38


def check_plot(path: Path | str) -> None:
    """Raise `DSparkError` if `save_plot` could not write `path`. To be called before the measurement."""
    file = Path(path)
    if importlib.util.find_spec("matplotlib") is None:
        raise DSparkError(f"matplotlib is not installed: {install_hint('matplotlib', 'plot')}", field="--plot")
    if file.suffix.lower() not in _SUFFIXES:
        raise DSparkError(field="--plot", found=file.name, allowed=f"a file name that ends in {', '.join(_SUFFIXES)}")
    if not file.absolute().parent.is_dir():
        raise DSparkError(f"{file.absolute().parent}: no such directory", field="--plot", found=file)


def save_plot(benchmark: Benchmark, path: Path | str) -> None:
    """Draw tokens per second by set, plain and with the best k, to `path`. Raises `DSparkError` as `check_plot` does.

    The ratio stands in the speculative bar; a marker shows the predicted speed. Without a draft only plain is drawn.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    best = benchmark.best
    sets = [
        figures
        for figures in benchmark.sets
        if best and (figures.num_speculative_tokens, figures.proposal) == (best.num_speculative_tokens, best.proposal)
    ]
    # A gap sets the last group, all sets together, apart.
    centres = [index + (0.35 if name == ALL_SETS else 0.0) for index, name in enumerate(benchmark.plain)]
    shift = _BAR / 2 if sets else 0.0
    figure = Figure(figsize=(2.4 + 1.1 * max(len(centres), 4), 4.8), layout="constrained")
    axes = figure.add_subplot()
    plain = [figures.tokens_per_second for figures in benchmark.plain.values()]
    axes.bar([centre - shift for centre in centres], plain, _BAR, color=_PLAIN, label="plain")
    if sets:
        _draw_speculative(axes, sets, [centre + shift for centre in centres])
    axes.set_xticks(centres, list(benchmark.plain))
    axes.set_ylabel("tokens per second after the first", color=_INK)
    axes.set_title(_title(benchmark), loc="left", fontsize=9, color=_FAINT)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, colors=_INK)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.legend(*_legend(axes), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def _draw_speculative(axes: Any, sets: list[SetFigures], places: list[float]) -> None:
    drafts = sets[0].num_speculative_tokens
    speeds = [figures.speculative.tokens_per_second for figures in sets]
    axes.bar(
        places,
        speeds,
        _BAR,
        color=_SPECULATIVE,
        label=f"speculative, {drafts} draft{'s' if drafts > 1 else ''} a round",
    )
    predicted = [figures.predicted_ratio * figures.plain.tokens_per_second for figures in sets]
    axes.plot(
        places,
        predicted,
        "D",
        color=_PREDICTED,
        markersize=7,
        markeredgecolor="white",
        label="predicted: tau / cost of a round",
    )
    for place, figures in zip(places, sets, strict=True):
        # At the foot of the bar, so that the number does not cover the marker.
        text = f"{figures.ratio:.2f}x"
        axes.annotate(
            text, (place, 0), (0, 8), textcoords="offset points", ha="center", fontsize=10, color="white", weight="bold"
        )


def _legend(axes: Any) -> tuple[list[Any], list[str]]:
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda index: labels[index].startswith("predicted"))
    return [handles[index] for index in order], [labels[index] for index in order]


def _title(benchmark: Benchmark) -> str:
    settings, machine = benchmark.settings, benchmark.machine
    target, draft = Path(settings["target"]).name, settings["draft"]
    return "\n".join(
        [
            f"{target} + {Path(draft).name}" if draft else target,
            f"{settings['dtype']}, greedy, batch 1, medians of {settings['repeats']} repeats",
            f"{machine.processor}, {machine.cores} cores, {machine.platform}, jax {machine.jax}",
        ]
    )
