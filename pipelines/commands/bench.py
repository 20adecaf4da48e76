"""`dspark bench`: compares plain and speculative decoding. Table or JSON on stdout, progress on stderr."""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_jax.pipelines.commands.arguments import (
    add_compilation_cache,
    add_confidence_threshold,
    add_draft_overrides,
    add_pair,
    add_template_vars,
    draft_overrides,
    flags_in_errors,
    path_name,
    refuse_overrides,
    template_vars,
    whole_number,
)
from dspark_jax.pipelines.commands.sampling_arguments import add_numbers, numbers_of
from dspark_jax.pipelines.text.prompts_file import FilePrompt, read_prompts_file
from dspark_jax.speculators_common.errors import RequestError

if TYPE_CHECKING:
    from dspark_jax.pipelines.bench.benchmark import Benchmark
    from dspark_jax.pipelines.bench.options import PromptSet
    from dspark_jax.pipelines.checkpoints.loading import PreparedTarget


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add `bench` to the result of `ArgumentParser.add_subparsers`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench",
        help="plain against speculative decoding, in one process",
        description=(
            "Time plain against speculative decoding of the same prompts, in turn, in one process: batch of "
            "one, device loop, greedy unless a temperature is given."
        ),
    )
    models = parser.add_argument_group("models")
    add_pair(models, without_draft="without it plain decoding alone is measured")
    models.add_argument(
        "--num-speculative-tokens",
        type=_draft_counts,
        default=(),
        metavar="K[,K...]",
        help="drafts per round, several to compare them (all of the block)",
    )
    add_confidence_threshold(models)
    add_numbers(parser.add_argument_group("sampling: at a temperature both kinds of proposal are measured"))
    add_draft_overrides(models)
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument(
        "--prompts-file",
        required=True,
        nargs="+",
        action="extend",
        type=path_name,
        metavar="FILE",
        help="one prompt set each: a prompt a line, or .jsonl with `prompt`, `messages` or `turns` (the first)",
    )
    prompts.add_argument(
        "--prompts-per-set", type=whole_number(1), default=4, metavar="N", help="the first N prompts of each file (4)"
    )
    add_template_vars(prompts)
    prompts.add_argument(
        "--max-new-tokens", type=whole_number(2), default=96, metavar="N", help="budget of each prompt (96)"
    )
    prompts.add_argument(
        "--repeats",
        type=whole_number(1),
        default=3,
        metavar="N",
        help="how often each prompt is decoded; medians are reported (3)",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the table")
    output.add_argument("--plot", type=path_name, metavar="FILE.png", help="also draw the result (needs matplotlib)")
    add_compilation_cache(output)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns the exit status. Raises `DSparkError` for wrong input."""
    texts = _read_sets(args.prompts_file, args.prompts_per_set)
    # Imported here because jax takes a second to import: wrong arguments are refused before that.
    from dspark_jax.pipelines.bench.plot import check_plot, save_plot
    from dspark_jax.pipelines.bench.report import as_json, as_text

    if args.plot:
        check_plot(args.plot)
    benchmark, cache = _measure(args, texts)
    if args.json:
        print(
            json.dumps(
                {"command": shlex.join(["dspark", *sys.argv[1:]]), "compilation_cache": cache, **as_json(benchmark)}
            )
        )
    else:
        print(as_text(benchmark))
    if args.plot:
        save_plot(benchmark, args.plot)
        print(f"wrote {args.plot}", file=sys.stderr)
    return 0


def _measure(args: argparse.Namespace, texts: dict[str, list[FilePrompt]]) -> tuple[Benchmark, str]:
    import tqdm

    from dspark_jax.pipelines.bench.benchmark import run_benchmark
    from dspark_jax.pipelines.bench.options import BenchmarkOptions, check_benchmark
    from dspark_jax.pipelines.checkpoints.loading import prepare_draft, prepare_target, read_draft, read_target
    from dspark_jax.pipelines.compilation import use_compilation_cache

    options = BenchmarkOptions(
        num_speculative_tokens=args.num_speculative_tokens,
        max_new_tokens=args.max_new_tokens,
        repeats=args.repeats,
        confidence_threshold=args.confidence_threshold,
        sampling=numbers_of(args),
        dtype=args.dtype,
    )
    clock = _LoadClock()
    overrides = draft_overrides(args)
    with flags_in_errors():
        if args.draft is None:
            refuse_overrides(overrides)
        with clock.of("target"):
            prepared_target = prepare_target(args.target, args.dtype)
        with clock.of("draft"):
            prepared_draft = (
                None if args.draft is None else prepare_draft(args.draft, prepared_target, args.dtype, overrides)
            )
        sets = _encoded(texts, prepared_target, template_vars(args))
        check_benchmark(prepared_target, prepared_draft, sets, options)
    cache = use_compilation_cache(args.compilation_cache)
    with clock.of("target"):
        target = read_target(prepared_target)
    with clock.of("draft"):
        draft = None if prepared_draft is None else read_draft(prepared_draft)
    load_seconds = {name: seconds for name, seconds in clock.seconds.items() if name == "target" or draft is not None}
    with tqdm.tqdm(bar_format="{desc} [{elapsed}]", disable=None, leave=False) as status:
        return run_benchmark(
            target, draft, sets, options, load_seconds=load_seconds, report_step=status.set_description_str
        ), cache


class _LoadClock:
    """Seconds of loading per model, preparing and reading together."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started


def _read_sets(files: Sequence[str], count: int) -> dict[str, list[FilePrompt]]:
    """The first `count` prompts of each file. A set's name is the file's stem if that is unique, else its path."""
    repeated = [file for file, uses in collections.Counter(files).items() if uses > 1]
    if repeated:
        raise RequestError(
            f"found {repeated[0]} twice, allowed each file once",
            field="--prompts-file",
            found=repeated[0],
            allowed="each file once",
        )
    stems = collections.Counter(Path(file).stem for file in files)
    taken = [stem for stem, uses in stems.items() if uses > 1] + ["all"]  # the name of all sets together
    return {file if Path(file).stem in taken else Path(file).stem: read_prompts_file(file)[:count] for file in files}


def _encoded(texts: dict[str, list[FilePrompt]], target: PreparedTarget, variables: dict[str, Any]) -> list[PromptSet]:
    from dspark_jax.pipelines.bench.options import PromptSet
    from dspark_jax.pipelines.text.prompts import encode_prompt

    def ids(prompt: FilePrompt) -> tuple[int, ...]:
        source = str(target.checkpoint.path)
        try:
            return tuple(encode_prompt(prompt.content, target.tokenizer, template_vars=variables, source=source))
        except RequestError as error:
            raise error.at(prompt.location) from error

    return [PromptSet(name=name, prompts=tuple(map(ids, prompts))) for name, prompts in texts.items()]


def _draft_counts(text: str) -> tuple[int, ...]:
    """Integers >= 1 with commas between them."""
    one = whole_number(1)
    return tuple(one(part.strip()) for part in text.split(","))
