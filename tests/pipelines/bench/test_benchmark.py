"""The benchmark of a tiny pair: its probes, its outputs and its options. No test asserts a time."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from dspark_jax.pipelines.bench import benchmark
from dspark_jax.pipelines.bench import plot as benchmark_plot
from dspark_jax.pipelines.bench.benchmark import Benchmark, run_benchmark
from dspark_jax.pipelines.bench.figures import Run
from dspark_jax.pipelines.bench.machine import ReadProbe
from dspark_jax.pipelines.bench.options import ALL_SETS, BenchmarkOptions, PromptSet
from dspark_jax.pipelines.bench.probes import RoundClock, alternating_medians, stream_seconds
from dspark_jax.pipelines.bench.report import as_json, as_text
from dspark_jax.pipelines.checkpoints.loading import LoadedDraft, LoadedTarget, load_draft, load_target
from dspark_jax.pipelines.commands import bench
from dspark_jax.pipelines.sampling.generation import Generation
from dspark_jax.pipelines.speculative.engine import Engine, EngineOptions
from dspark_jax.speculators_common.errors import DSparkError, RequestError
from tests.support.requests import request_for

pytestmark = pytest.mark.usefixtures("quick_compilation")


# ---- measuring a tiny pair


@pytest.fixture(scope="module")
def pair(data_dir: Path) -> tuple[LoadedTarget, LoadedDraft]:
    target = load_target(data_dir / "D_loop/target", jnp.float32)
    return target, load_draft(data_dir / "D_loop/draft", target, jnp.float32)


PROMPTS = (
    PromptSet(name="one", prompts=((3, 17, 60, 5), (9, 9, 101))),
    PromptSet(name="other", prompts=((150, 2, 44, 71, 12),)),
)


@pytest.fixture(scope="module")
def measured(pair: tuple[LoadedTarget, LoadedDraft]) -> Benchmark:
    options = BenchmarkOptions(
        num_speculative_tokens=(2,), max_new_tokens=12, repeats=2, dtype=jnp.float32, bandwidth_bytes=1 << 16
    )
    return run_benchmark(*pair, PROMPTS, options, load_seconds={"target": 1.0, "draft": 0.5})


def test_a_benchmark_reports_every_set_and_all_of_them(measured: Benchmark) -> None:
    assert [figures.name for figures in measured.sets] == ["one", "other", ALL_SETS]
    one, other, together = measured.sets
    assert together.speculative.rounds == one.speculative.rounds + other.speculative.rounds
    assert together.plain.tokens == one.plain.tokens + other.plain.tokens
    assert [figures.num_prompts for figures in measured.sets] == [2, 1, 3]
    assert measured.best == together
    assert list(measured.plain) == ["one", "other", ALL_SETS]


def test_both_ways_say_the_same_and_plain_rounds_have_no_drafts(measured: Benchmark) -> None:
    together = measured.sets[-1]
    assert together.identical_texts == 3
    assert together.common_prefix == 1
    assert together.plain.offered == ()
    assert together.plain.tau == 1
    assert len(together.speculative.offered) == 2
    assert together.speculative.tau == pytest.approx(
        1 + sum(together.speculative.acceptance), abs=0.35
    )  # a stop or the row's end cuts rounds


def test_every_figure_was_measured(measured: Benchmark) -> None:
    [figures] = measured.rounds
    assert figures.num_speculative_tokens == 2
    assert (
        min(
            figures.plain_step_seconds,
            figures.round_seconds,
            figures.verify_seconds,
            figures.stream_seconds,
            figures.host_seconds,
        )
        > 0
    )
    assert figures.host_share == pytest.approx(figures.host_seconds / figures.stream_seconds)
    assert measured.roofline.bytes_per_second > 0
    assert [start.num_speculative_tokens for start in measured.starts] == [0, 2]
    assert all(start.num_programs > 0 and 0 < start.compile_seconds <= start.seconds for start in measured.starts)
    last = measured.starts[-1]
    assert measured.start_to_first_token_seconds == pytest.approx(1.5 + last.seconds + last.first_token_seconds)


def test_settings_say_what_was_run(measured: Benchmark) -> None:
    settings = measured.settings
    assert settings["dtype"] == "float32"
    assert settings["num_speculative_tokens"] == [2]
    assert settings["prompts"] == {"one": [4, 3], "other": [5]}
    assert (settings["sampling"], settings["driver"], settings["batch_size"], settings["repeats"]) == (
        "greedy",
        "device loop",
        1,
        2,
    )
    assert settings["page_buckets"] == [4]
    assert measured.machine.cores >= 1
    assert measured.machine.jax.startswith("0.")


def test_the_json_object_holds_the_figures(measured: Benchmark) -> None:
    found = json.loads(json.dumps(as_json(measured)))
    assert found["best_num_speculative_tokens"] == 2
    assert found["sets"][-1]["speculative"]["tau"] == measured.sets[-1].speculative.tau
    assert found["roofline"]["reached"] == measured.roofline.reached


def test_the_table_has_one_line_per_set_under_one_header(measured: Benchmark) -> None:
    lines = as_text(measured).splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("set "))
    assert [line.split()[0] for line in lines[start + 1 : start + 4]] == ["one", "other", ALL_SETS]
    assert f"{measured.sets[0].ratio:.2f}" in lines[start + 1]
    assert lines[-1].startswith("best over all sets: 2 drafts a round")


def test_without_a_draft_plain_decoding_is_measured_alone(pair: tuple[LoadedTarget, LoadedDraft]) -> None:
    options = BenchmarkOptions(max_new_tokens=4, repeats=1, dtype=jnp.float32, bandwidth_bytes=1 << 16)
    measured = run_benchmark(pair[0], None, PROMPTS[1:], options)
    assert (measured.sets, measured.rounds, measured.best) == ((), (), None)
    assert measured.plain["other"].tokens == 3
    assert "plain tok/s" in as_text(measured)


@pytest.mark.thorough
def test_at_a_temperature_both_kinds_of_proposal_are_measured(pair: tuple[LoadedTarget, LoadedDraft]) -> None:
    options = BenchmarkOptions(
        num_speculative_tokens=(2,),
        max_new_tokens=8,
        repeats=1,
        dtype=jnp.float32,
        bandwidth_bytes=1 << 16,
        sampling=Generation(temperature=0.8, top_p=0.9),
        sampled_rows=(1,),
    )
    measured = run_benchmark(*pair, PROMPTS[1:], options)
    together = [figures for figures in measured.sets if figures.name == ALL_SETS]
    assert [(figures.num_speculative_tokens, figures.proposal) for figures in together] == [
        (2, "argmax"),
        (2, "sampled"),
    ]
    assert together[0].identical_texts == 1  # the same seed
    assert [figures.proposal for figures in measured.sampled] == ["argmax", "sampled"]
    assert all(figures.ratio(1) > 0 for figures in measured.sampled)
    text = as_text(measured)
    assert "temperature 0.8, top_p 0.9, batch 1" in text
    assert "2 sampled drafts a round" in text
    assert text.count("of a greedy round") == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": Generation(temperature=-1)}, "temperature: found -1, allowed 0..100"),
        ({"num_speculative_tokens": (2, 9)}, "num_speculative_tokens: found 9, allowed 1..5 ("),
        ({"max_new_tokens": 1}, "max_new_tokens: found 1, allowed 2 or more"),
        ({"repeats": 0}, "repeats: found 0, allowed 1 or more"),
        ({"max_new_tokens": 600}, "one: prompt 1: found 4 tokens and 600 new ones, allowed 512 together"),
    ],
)
def test_options_that_the_pair_does_not_allow_are_refused(
    pair: tuple[LoadedTarget, LoadedDraft], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        run_benchmark(*pair, PROMPTS, dataclasses.replace(BenchmarkOptions(), **changes))
    assert message in str(caught.value)


@pytest.mark.parametrize("changes", [{"num_speculative_tokens": (2,)}, {"confidence_threshold": 0.5}])
def test_draft_options_without_a_draft_are_refused(
    pair: tuple[LoadedTarget, LoadedDraft], changes: dict[str, Any]
) -> None:
    with pytest.raises(RequestError, match="allowed only with a draft"):
        run_benchmark(pair[0], None, PROMPTS, dataclasses.replace(BenchmarkOptions(), **changes))


@pytest.mark.parametrize(
    "sets",
    [
        (),
        (PromptSet(name="empty", prompts=()),),
        (PROMPTS[0], PROMPTS[0]),
        (PromptSet(name=ALL_SETS, prompts=((1,),)),),
    ],
)
def test_sets_that_cannot_be_told_apart_or_are_empty_are_refused(
    pair: tuple[LoadedTarget, LoadedDraft], sets: tuple[PromptSet, ...]
) -> None:
    with pytest.raises(RequestError, match="prompts: found"):
        run_benchmark(*pair, sets)


def test_a_set_that_ends_with_every_first_token_is_refused(pair: tuple[LoadedTarget, LoadedDraft]) -> None:
    found = benchmark._Bench(pair[0], None, PROMPTS, BenchmarkOptions())
    ended = Run(prompt_length=4, output_ids=(5,), rounds=(), committed=0, seconds=0.0, first_token_seconds=0.1)
    found.runs = {
        ("one", 0, 0): [ended],
        ("one", 1, 0): [ended],
        ("other", 0, 0): [dataclasses.replace(ended, rounds=((0, 0),))],
    }
    found._check_rounds(PROMPTS[1])
    with pytest.raises(RequestError, match="one: every prompt ended with its first token"):
        found._check_rounds(PROMPTS[0])


def test_engines_read_the_page_counts_of_one_with_room_for_much_more(pair: tuple[LoadedTarget, LoadedDraft]) -> None:
    long = PromptSet(name="long", prompts=(tuple(range(100)) * 3,))
    options = BenchmarkOptions(num_speculative_tokens=(1, 5), max_new_tokens=96)
    found = benchmark._Bench(*pair, [long], options)
    assert (
        found.buckets.counts
        == (4, 8)
        == Engine(pair[0].module, None, EngineOptions(max_seq_len=2048)).plan.page_buckets[:2]
    )
    assert {engine.plan.page_buckets for engine in found.engines} == {(4, 8)}


# ---- the probes


@pytest.fixture(scope="module")
def engine(pair: tuple[LoadedTarget, LoadedDraft]) -> Engine:
    return Engine(
        pair[0].module, None, EngineOptions(max_seq_len=60, page_size=16, prefill_chunks=(8,), rounds_per_call=5)
    )


def test_a_round_without_drafting_still_verifies_every_draft(engine: Engine) -> None:
    """The programs of plain decoding, with drafts in the state, run the round without drafting."""
    probe = engine.probe(num_verified=3)
    clock = RoundClock(probe)
    clock.measure(4)
    clock.measure(4)
    assert len(clock.times[4]) == 2
    _, rounds = probe.run_rounds(4)
    assert rounds == 5
    assert probe.proposed.tolist() == [[3] * 5]


def test_an_empty_call_runs_no_round(engine: Engine) -> None:
    probe = engine.probe(num_verified=0)
    assert probe.run_rounds(4)[1] == 5
    assert probe.run_empty(4) > 0
    assert probe.proposed.tolist() == [[-1] * 5]


def test_timing_rounds_changes_no_output(engine: Engine) -> None:
    request = request_for(prompt_ids=(3, 17, 60, 5), max_new_tokens=6)
    before = engine.generate([request])[0].output_ids
    figures = stream_seconds(engine, request)
    assert 0 < figures.between_calls < figures.wall
    assert engine.generate([request])[0].output_ids == before


def test_variants_take_turns() -> None:
    calls: list[str] = []
    medians = alternating_medians({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=2)
    assert calls == ["a", "b"] * 3
    assert set(medians) == {"a", "b"}


def test_the_bandwidth_is_a_median_and_at_most_the_best_read() -> None:
    probe = ReadProbe(1 << 16)
    for _ in range(5):
        probe.measure()
    assert 0 < probe.bytes_per_second() <= probe.best_bytes_per_second()


# ---- the picture


def test_the_plot_is_written(measured: Benchmark, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    benchmark_plot.save_plot(measured, tmp_path / "speed.png")
    content = (tmp_path / "speed.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 10_000


def test_a_missing_matplotlib_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(benchmark_plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DSparkError) as caught:
        benchmark_plot.check_plot(tmp_path / "speed.png")
    assert str(caught.value) == (
        "--plot: matplotlib is not installed: pip install matplotlib (or the extra: pip install 'dspark-jax[plot]', in "
        "a checkout pip install -e '.[plot]')"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [("speed.docx", "allowed a file name that ends in .png"), ("missing/speed.png", "no such directory")],
)
def test_a_plot_that_cannot_be_written_is_refused_early(name: str, message: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(DSparkError, match=message):
        benchmark_plot.check_plot(tmp_path / name)


# ---- arguments


def _parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", *arguments])


def test_arguments_have_the_documented_defaults() -> None:
    args = _parsed("--target", "t", "--prompts-file", "a.txt", "b.txt")
    assert (args.prompts_file, args.prompts_per_set, args.max_new_tokens, args.repeats) == (
        ["a.txt", "b.txt"],
        4,
        96,
        3,
    )
    assert (args.dtype, args.num_speculative_tokens, args.confidence_threshold) == ("bfloat16", (), 0.0)
    assert _parsed(
        "--target", "t", "--prompts-file", "a", "--num-speculative-tokens", "2,3, 6"
    ).num_speculative_tokens == (2, 3, 6)


@pytest.mark.parametrize("value", ["0", "2,", "two", "-1"])
def test_draft_counts_are_whole_numbers(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        _parsed("--target", "t", "--prompts-file", "a", f"--num-speculative-tokens={value}")
    assert caught.value.code == 2
    assert "allowed a whole number >= 1" in capsys.readouterr().err


def test_a_set_is_called_after_its_file_or_its_path(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("maths.txt", "a/code.txt", "b/code.txt", "all.txt")]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text("first\nsecond\nthird\n")
    sets = bench._read_sets([str(file) for file in files], 2)
    assert list(sets) == ["maths", str(files[1]), str(files[2]), str(files[3])]
    assert [prompt.content for prompt in sets["maths"]] == ["first", "second"]
    with pytest.raises(RequestError, match=r"maths.txt twice, allowed each file once"):
        bench._read_sets([str(files[0]), str(files[0])], 2)
