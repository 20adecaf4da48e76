"""`dspark generate`: continues prompts. Text or JSON on stdout, everything else on stderr."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dspark_jax.pipelines.commands.arguments import (
    add_compilation_cache,
    add_confidence_threshold,
    add_draft_overrides,
    add_pair,
    add_template_vars,
    draft_overrides,
    flags_in_errors,
    id_list,
    path_name,
    template_vars,
    whole_number,
)
from dspark_jax.pipelines.commands.sampling_arguments import (
    add_ends,
    add_grammar,
    add_sampling,
    decoding_choices,
    generation_of,
    grammar_flag,
    stated_choices,
)
from dspark_jax.speculators_common.errors import RequestError
from dspark_jax.speculators_common.formats.choice import Choice

if TYPE_CHECKING:
    from dspark_jax.pipelines.api import PreparedPipeline
    from dspark_jax.pipelines.sampling.generation import Generation, Request


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add `generate` to the result of `ArgumentParser.add_subparsers`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "generate",
        help="generate text; with a draft faster, and the same text",
        description="Greedy decoding, or sampling at a temperature; speculative with a draft. Text goes to stdout, "
        "everything else to stderr.",
    )
    models = parser.add_argument_group("models")
    add_pair(models, without_draft="without it decoding is plain")
    models.add_argument(
        "--num-speculative-tokens",
        type=whole_number(1),
        metavar="K",
        help="drafts per round (what the checkpoint states, or a number that is fast on this platform)",
    )
    add_confidence_threshold(models)
    add_draft_overrides(models)
    prompts = parser.add_argument_group("prompts, exactly one of").add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", metavar="TEXT", help="a user message; - reads it from stdin")
    prompts.add_argument(
        "--prompts-file",
        type=path_name,
        metavar="FILE",
        help="a prompt a line, or .jsonl with `prompt`, `messages` or `turns` (the first is taken)",
    )
    prompts.add_argument("--prompt-ids", type=id_list, metavar="ID,ID,...", help="token ids, as they are")
    text = parser.add_argument_group("text")
    text.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    text.add_argument("--raw", action="store_true", help="no chat template: continue the text as it is")
    add_template_vars(text)
    add_ends(text)
    add_grammar(text)
    text.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        help="show text as rounds complete (for one prompt, or on a terminal)",
    )
    text.add_argument("--json", action="store_true", help="one JSON object per prompt on stdout")
    text.add_argument(
        "--compare",
        action="store_true",
        help="then decode the prompt again, plainly and speculatively, and show both speeds",
    )
    add_sampling(parser.add_argument_group("choice of tokens"))
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument(
        "--batch-size", type=whole_number(1), default=1, metavar="B", help="prompts that decode together (1)"
    )
    sizes.add_argument(
        "--max-seq-len",
        type=whole_number(2),
        metavar="N",
        help="tokens of prompt and output together (2048, or the model's maximum)",
    )
    add_compilation_cache(sizes)
    return parser


def run(args: argparse.Namespace) -> int:
    """Generate and print; returns the exit status. Raises `DSparkError` for wrong input."""
    prompts = list(_read_prompts(args))
    stream = _checked_stream(args, len(prompts) * args.n)
    # Imported here because jax takes a second to import: wrong arguments are refused before that.
    from dspark_jax.pipelines.api import prepare
    from dspark_jax.pipelines.bench.comparison import compare, comparison_lines
    from dspark_jax.pipelines.checkpoints.generation_config import stated_generation
    from dspark_jax.pipelines.checkpoints.load_choices import choice_lines
    from dspark_jax.pipelines.commands import generate_output as output
    from dspark_jax.pipelines.compilation import CompileClock, use_compilation_cache

    cache = Choice(
        name="compiled_programs",
        value=use_compilation_cache(args.compilation_cache),
        reason="",
        flag="--compilation-cache",
    )
    with flags_in_errors(prompt="--prompt" if args.prompt_ids is None else "--prompt-ids", grammar=grammar_flag(args)):
        prepared = prepare(
            args.target,
            args.draft,
            dtype=args.dtype,
            num_speculative_tokens=args.num_speculative_tokens,
            max_seq_len=args.max_seq_len,
            batch_size=args.batch_size,
            proposal=args.proposal,
            acceptance=args.acceptance,
            **dataclasses.asdict(draft_overrides(args)),
        )
        stated = (
            stated_generation(prepared.target.checkpoint, prepared.plan.vocab_size) if args.generation_config else None
        )
        generation = generation_of(args, stated)
        requests = _requests(prepared, args, prompts, generation)
        decoding = [*stated_choices(stated), *decoding_choices(generation, requests, args)]
        pipeline = prepared.load(announce=lambda choices: output.say(*choice_lines((*choices, cache, *decoding))))
    writer = output.Writer(pipeline, as_json=args.json)
    with CompileClock().watching() as clock:
        results = writer.stream(requests) if stream else writer.collect(requests, hold=args.compare and args.json)
    output.say(*output.figure_lines(results, writer.seconds, clock, pipeline.load_seconds))
    output.say(*output.warning_lines(results, None if pipeline.draft is None else pipeline.draft.config))
    if args.compare:
        output.say("", "decoding the prompt again, plainly and speculatively in turn ...")
        comparison = compare(pipeline, requests[0])
        output.say(*comparison_lines(comparison, args.dtype))
        if args.json:
            writer.write(results[0], comparison)
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Prompt:
    """One prompt and its name in errors; a single prompt has none."""

    content: str | tuple[int, ...] | list[dict[str, Any]]
    name: str = ""


def _read_prompts(args: argparse.Namespace) -> Iterator[_Prompt]:
    if args.prompt_ids is not None:
        for flag in ("raw", "system", "template_var"):
            if getattr(args, flag):
                raise RequestError(
                    "found beside --prompt-ids, allowed with text",
                    field=f"--{flag.replace('_', '-')}",
                    allowed="with text",
                )
        yield _Prompt(content=args.prompt_ids)
    elif args.prompts_file is not None:
        from dspark_jax.pipelines.text.prompts_file import read_prompts_file

        prompts = read_prompts_file(args.prompts_file)
        if any(prompt.later_turns for prompt in prompts):
            _say(f"{args.prompts_file}: the first of each conversation's turns is the prompt")
        for prompt in prompts:
            yield _Prompt(content=prompt.content, name=prompt.location)
    else:
        yield _Prompt(content=_stdin_text() if args.prompt == "-" else args.prompt)


def _stdin_text() -> str:
    if sys.stdin is None:
        raise RequestError("found a closed stdin, allowed text", field="--prompt -", allowed="text")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"found bytes that are not {error.encoding} text on stdin",
            field="--prompt -",
            allowed=f"{error.encoding} text",
        ) from error


def _checked_stream(args: argparse.Namespace, num_outputs: int) -> bool:
    """Whether text is shown as rounds complete. Raises `RequestError` for flags that exclude each other."""
    pairs = [
        (args.system is not None and args.raw, "--system", "--raw"),
        (args.template_var and args.raw, "--template-var", "--raw"),
        (args.stream and args.json, "--stream", "--json"),
        (args.stream and args.batch_size > 1, "--stream", "--batch-size above 1"),
        (args.compare and args.batch_size > 1, "--compare", "--batch-size above 1"),
        (args.compare and args.n > 1, "--compare", "--n above 1"),
        (args.compare and num_outputs > 1, "--compare", "a file of several prompts"),
    ]
    for is_fault, one, other in pairs:
        if is_fault:
            raise RequestError(f"found beside {other}, allowed one of the two", field=one, allowed=f"without {other}")
    if args.logprobs is not None and not args.json:
        raise RequestError("found without --json, allowed with it", field="--logprobs", allowed="with --json")
    if args.compare and not args.draft:
        raise RequestError("found without --draft, allowed with one", field="--compare", allowed="with --draft")
    if args.stream is not None:
        return bool(args.stream)
    return not args.json and args.batch_size == 1 and (num_outputs == 1 or sys.stdout.isatty())


def _requests(
    prepared: PreparedPipeline, args: argparse.Namespace, prompts: Sequence[_Prompt], generation: Generation
) -> list[Request]:
    tokenizer = prepared.target.tokenizer
    if tokenizer is not None and tokenizer.chat_template is None and args.prompt_ids is None and not args.raw:
        _say(f"{prepared.target.checkpoint.path}: no chat template; the prompt is continued as it is")
    from dspark_jax.pipelines.requests import PromptFormat

    requests = prepared.requests(
        [prompt.content for prompt in prompts],
        generation,
        PromptFormat(raw=args.raw, system=args.system, template_vars=template_vars(args)),
        n=args.n,
        names=[prompt.name for prompt in prompts] if prompts[0].name else None,
    )
    _say_cut_budgets(prepared, requests)
    return requests


def _say_cut_budgets(prepared: PreparedPipeline, requests: Sequence[Request]) -> None:
    """Say once on stderr if `--max-new-tokens` is more than the longest sequence allows."""
    allowed = [prepared.plan.allowed_new_tokens(request) for request in requests]
    asked = requests[0].generation.max_new_tokens
    if min(allowed) < asked:
        least = f"{min(allowed)} new tokens" + (" or more" if len(set(allowed)) > 1 else "")
        _say(
            f"--max-new-tokens: found {asked}, but {prepared.plan.longest} tokens of prompt and output are the most "
            f"that fit (--max-seq-len): texts end after {least}"
        )


def _say(line: str) -> None:
    print(line, file=sys.stderr)
