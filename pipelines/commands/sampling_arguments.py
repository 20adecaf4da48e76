"""The flags of `dspark generate` that say how tokens are chosen and where texts end, and what is said about them."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dspark_jax.pipelines.commands.arguments import Arguments, any_number, id_list, integer, path_name, whole_number
from dspark_jax.speculators_common.errors import RequestError
from dspark_jax.speculators_common.formats.choice import Choice

if TYPE_CHECKING:
    from dspark_jax.pipelines.checkpoints.generation_config import StatedGeneration
    from dspark_jax.pipelines.sampling.generation import Generation, GenerationFields, Request
    from dspark_jax.pipelines.sampling.grammar import Grammar

# Name of a field of `Generation` -> name of its argument, where that is another one.
_ARGUMENTS = {"banned_ids": "ban_ids", "num_logprobs": "logprobs", "stop_strings": "stop"}
_FIELDS = (
    "max_new_tokens",
    "min_new_tokens",
    "stop_ids",
    "stop_strings",
    "confidence_threshold",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "banned_ids",
    "seed",
    "num_logprobs",
)
_SHOWN = _FIELDS[_FIELDS.index("temperature") : _FIELDS.index("logit_bias")]
_OF_SAMPLING = ("top_k", "top_p", "min_p", "seed")  # without a temperature they would do nothing
_SHOWN_SEEDS = 4
_FORMS = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar"}
# Kind of a grammar -> its flag, what the flag takes, and its help.
_GRAMMARS = {
    "json_schema": ("--json-schema", "FILE", "the text is JSON that this schema allows"),
    "regex": ("--regex", "TEXT", "the whole text matches this regular expression"),
    "lark": ("--grammar", "FILE", "the text follows this Lark grammar"),
}


def add_ends(text: Arguments) -> None:
    """The flags that say where a text ends."""
    text.add_argument(
        "--max-new-tokens", type=whole_number(1), metavar="N", help="budget; --max-seq-len ends a text, too (256)"
    )
    text.add_argument(
        "--min-new-tokens", type=integer, metavar="N", help="no stop token or stop string before this many tokens (0)"
    )
    text.add_argument(
        "--stop-ids", type=id_list, metavar="ID,ID,...", help="token ids that end an output (those of the model)"
    )
    text.add_argument("--stop", action="append", metavar="TEXT", help="a text that ends an output (repeatable)")


def add_grammar(text: argparse._ArgumentGroup) -> None:
    """The flags that say which form a text has: at most one of them."""
    form = text.add_mutually_exclusive_group()
    for kind, (flag, metavar, what) in _GRAMMARS.items():
        form.add_argument(flag, dest=kind, type=path_name if metavar == "FILE" else str, metavar=metavar, help=what)


def grammar_of(args: argparse.Namespace) -> Grammar | None:
    """The form that the flags ask for. Raises `RequestError` for a file that cannot be read."""
    from dspark_jax.pipelines.sampling.grammar import GRAMMAR_KINDS, Grammar

    for kind in GRAMMAR_KINDS:
        if (given := getattr(args, kind)) is not None:
            flag, metavar, _ = _GRAMMARS[kind]
            return Grammar(kind, _read_text(given, flag) if metavar == "FILE" else given)
    return None


def grammar_flag(args: argparse.Namespace) -> str:
    """The flag that states the grammar, for errors."""
    return next((flag for kind, (flag, _, _) in _GRAMMARS.items() if getattr(args, kind) is not None), "grammar")


def _read_text(file: str, flag: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RequestError(f"cannot be read: {reason}", file=file, field=flag) from error


def add_numbers(sampling: Arguments) -> None:
    """Temperature, filters and penalties."""
    for flag, kind, metavar, what in (
        ("--temperature", any_number, "X", "draw tokens at random; 0 is greedy decoding (0)"),
        ("--top-k", integer, "N", "draw among the N most probable tokens; 0 is off (0)"),
        ("--top-p", any_number, "X", "draw among the most probable tokens that have this probability together (1)"),
        ("--min-p", any_number, "X", "draw among tokens with this share of the largest probability (0)"),
        ("--repetition-penalty", any_number, "X", "weaken tokens of prompt and output; 1 is off (1)"),
        ("--presence-penalty", any_number, "X", "subtracted from the logits of tokens in the output (0)"),
        ("--frequency-penalty", any_number, "X", "subtracted once for each time that the output has the token (0)"),
    ):
        sampling.add_argument(flag, type=kind, metavar=metavar, help=what)


def add_sampling(sampling: Arguments) -> None:
    """The flags that say how tokens are chosen."""
    add_numbers(sampling)
    sampling.add_argument(
        "--logit-bias",
        type=_logit_bias,
        action="append",
        metavar="ID=VALUE",
        help="a number added to the logit of a token (repeatable)",
    )
    sampling.add_argument("--ban-ids", type=id_list, metavar="ID,ID,...", help="token ids that are never chosen")
    sampling.add_argument("--seed", type=integer, metavar="N", help="of the random numbers (drawn for each prompt)")
    sampling.add_argument("--n", type=integer, default=1, metavar="N", help="continuations of each prompt (1)")
    sampling.add_argument(
        "--logprobs",
        type=integer,
        metavar="N",
        help="with --json: log-probabilities of the tokens, and of the N most probable ones",
    )
    sampling.add_argument(
        "--proposal",
        choices=("argmax", "sampled"),
        default="argmax",
        help="drafts at a temperature: the most probable ones, which keeps the text of a seed, or drawn ones (argmax)",
    )
    sampling.add_argument(
        "--acceptance",
        metavar="RULE",
        help="not exact: relaxed[:N,DELTA] or synthetic:RATE, see docs/sampling.md (exact)",
    )
    sampling.add_argument(
        "--generation-config",
        action="store_true",
        help="take defaults from the target's generation_config.json; flags win",
    )


def numbers_of(args: argparse.Namespace) -> Generation:
    """The options that the flags of `add_numbers` state."""
    from dspark_jax.pipelines.sampling.generation import Generation

    stated = {name: value for name in _SHOWN if (value := getattr(args, name)) is not None}
    return Generation(**stated)


def generation_of(args: argparse.Namespace, stated: StatedGeneration | None) -> Generation:
    """The options of all prompts: the flags, else what `stated` says, else the defaults.

    Raises `RequestError` for a flag that would do nothing because decoding is greedy.
    """
    from dspark_jax.pipelines.sampling.generation import Generation, changed

    given = {name: getattr(args, _ARGUMENTS.get(name, name)) for name in _FIELDS}
    flags = {name: value for name, value in given.items() if value is not None}
    fields = {**({} if stated is None else stated.fields), **flags}
    generation = dataclasses.replace(changed(Generation(), cast("GenerationFields", fields)), grammar=grammar_of(args))
    idle = [name for name in _OF_SAMPLING if name in flags]
    if args.proposal != "argmax":
        idle.append("proposal")
    if idle and generation.temperature == 0:
        found = args.proposal if idle[0] == "proposal" else flags[idle[0]]
        raise RequestError(
            f"found {found} in greedy decoding, allowed with --temperature above 0",
            field=idle[0],
            found=found,
            allowed="with a temperature above 0",
        )
    return generation


def stated_choices(stated: StatedGeneration | None) -> list[Choice]:
    """What was taken from generation_config.json, and what was not."""
    if stated is None:
        return []
    taken = ", ".join(f"{name} {_shown(value)}" for name, value in stated.fields.items()) or "nothing"
    greedy = "" if stated.do_sample else "; greedy, as do_sample is not true"
    unused = f"; not used: {', '.join(stated.unused)}" if stated.unused else ""
    return [
        Choice(
            name="generation config", value=taken, reason=f"{stated.file}{greedy}{unused}", flag="--generation-config"
        )
    ]


def decoding_choices(generation: Generation, requests: Sequence[Request], args: argparse.Namespace) -> list[Choice]:
    """How tokens are chosen. Nothing for greedy decoding without further options."""
    from dspark_jax.pipelines.sampling.generation import Generation

    neutral = Generation()
    said = [
        f"{name.replace('_', '-').replace('-penalty', ' penalty')} {_shown(value)}"
        for name in _SHOWN
        if (value := getattr(generation, name)) != getattr(neutral, name)
    ]
    said += [f"logit bias of {_count(generation.logit_bias, 'id')}"] if generation.logit_bias else []
    said += [f"{_count(generation.banned_ids, 'id')} banned"] if generation.banned_ids else []
    said += [f"text of a {_FORMS[generation.grammar.kind]}"] if generation.grammar else []
    said += [f"at least {_count(range(generation.min_new_tokens), 'token')}"] if generation.min_new_tokens else []
    if not generation.samples:
        return [Choice(name="decoding", value=", ".join(["greedy", *said]), reason="", flag="")] if said else []
    said.append(_seeds(generation, requests))
    said += [f"{args.proposal} drafts"] if args.draft else []
    said += [f"{args.n} continuations"] if args.n > 1 else []
    return [Choice(name="sampling", value=", ".join(said), reason="", flag="")]


def _seeds(generation: Generation, requests: Sequence[Request]) -> str:
    if generation.seed is not None:
        return f"seed {generation.seed}"
    seeds = [str(request.generation.seed) for request in requests if request.sample == 0]
    shown = ", ".join(seeds[:_SHOWN_SEEDS])
    more = f" and {len(seeds) - _SHOWN_SEEDS} more, see --json" if len(seeds) > _SHOWN_SEEDS else ""
    return f"seed {shown} (drawn)" if len(seeds) == 1 else f"seeds {shown}{more} (drawn)"


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _count(items: Sequence[Any], what: str) -> str:
    return f"{len(items)} {what}{'s' if len(items) > 1 else ''}"


def _logit_bias(text: str) -> tuple[int, float]:
    """Id and number of `ID=VALUE`."""
    token, _, value = text.partition("=")
    try:
        [only] = id_list(token)
        return only, float(value)
    except (argparse.ArgumentTypeError, ValueError):
        raise argparse.ArgumentTypeError(f"found {text[:40]!r}, allowed ID=VALUE, as in 17=-2.5") from None
