"""The arguments that several subcommands share: definitions, types, and names in errors."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

from dspark_jax.speculators_common.errors import RequestError
from dspark_jax.speculators_common.formats.draft_config import DraftOverrides

TARGET_METAVAR = "DIR|ORG/NAME|GGUF|smollm2"
DRAFT_METAVAR = "DIR|ORG/NAME"
_FIELDS = (
    "batch_size",
    "confidence_threshold",
    "dtype",
    "frequency_penalty",
    "generation_config",
    "logit_bias",
    "max_new_tokens",
    "max_seq_len",
    "min_new_tokens",
    "min_p",
    "n",
    "num_speculative_tokens",
    "partial_rotary_factor",
    "presence_penalty",
    "acceptance",
    "proposal",
    "repeats",
    "repetition_penalty",
    "sample_from_anchor",
    "seed",
    "stop_ids",
    "system",
    "temperature",
    "top_k",
    "top_p",
)
# Field of an error of the Python interface -> flag of the command line.
_FLAGS = {field: f"--{field.replace('_', '-')}" for field in _FIELDS} | {
    "banned_ids": "--ban-ids",
    "kv cache": "--batch-size, --max-seq-len: kv cache",
    "num_logprobs": "--logprobs",
    "stop_strings": "--stop",
    "template_vars": "--template-var",
}

Arguments = Any  # an `argparse.ArgumentParser` or a group of one: argparse has no public type for both


def add_pair(models: Arguments, *, without_draft: str) -> None:
    """`--target`, `--draft` and `--dtype`. `without_draft` ends the help of `--draft`: what happens without it."""
    models.add_argument(
        "--target",
        required=True,
        type=path_name,
        metavar=TARGET_METAVAR,
        help="the model that decides; smollm2 is the demo model",
    )
    models.add_argument(
        "--draft", type=path_name, metavar=DRAFT_METAVAR, help=f"the model that proposes; {without_draft}"
    )
    models.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and caches (bfloat16)"
    )


def add_confidence_threshold(models: Arguments) -> None:
    """`--confidence-threshold`, 0 by default."""
    models.add_argument(
        "--confidence-threshold",
        type=number(minimum=0, maximum=1),
        default=0.0,
        metavar="X",
        help="verify only up to the first draft with a confidence below X (0)",
    )


def add_draft_overrides(models: Arguments) -> None:
    """Flags that override what a draft's files say; `draft_overrides` reads them."""
    models.add_argument(
        "--sample-from-anchor",
        action=argparse.BooleanOptionalAction,
        help="the draft's layout is anchor-first, or fill-in, whatever its files say",
    )
    models.add_argument(
        "--partial-rotary-factor",
        type=number(above=0, maximum=1),
        metavar="X",
        help="share of the draft's heads that rotates, whatever its files say",
    )


def draft_overrides(args: argparse.Namespace) -> DraftOverrides:
    """The values of `add_draft_overrides`."""
    return DraftOverrides(sample_from_anchor=args.sample_from_anchor, partial_rotary_factor=args.partial_rotary_factor)


def refuse_overrides(overrides: DraftOverrides) -> None:
    """Raise `RequestError` for an override of a draft where there is no draft."""
    for name, value in dataclasses.asdict(overrides).items():
        if value is not None:
            raise RequestError(field=_FLAGS[name], found=value, allowed="only with a draft")


def add_template_vars(group: Arguments) -> None:
    """`--template-var NAME=VALUE`, repeatable; `template_vars` reads the values."""
    group.add_argument(
        "--template-var",
        type=template_var,
        action="append",
        metavar="NAME=VALUE",
        help="a variable of the chat template, as in enable_thinking=false; VALUE is JSON or else text (repeatable)",
    )


def template_vars(args: argparse.Namespace) -> dict[str, Any]:
    """The values of `add_template_vars`."""
    found: dict[str, Any] = {}
    for name, value in args.template_var or ():
        if name in found:
            raise RequestError(
                f"found {name} twice, allowed each variable once",
                field="--template-var",
                found=name,
                allowed="each variable once",
            )
        found[name] = value
    return found


def add_compilation_cache(group: Arguments) -> None:
    """`--compilation-cache`."""
    group.add_argument(
        "--compilation-cache",
        type=path_name,
        metavar="DIR|off",
        help="where compiled programs are kept for the next run (dspark-jax in the user's cache directory)",
    )


@contextlib.contextmanager
def flags_in_errors(**flags: str) -> Iterator[None]:
    """Replace the field of an error of the Python interface, such as `stop_ids`, by its flag.

    `flags` are further pairs of field and flag.
    """
    try:
        yield
    except RequestError as error:
        flag = {**_FLAGS, **flags}.get(error.field)
        if flag is None or error.file:  # an error about a file needs no flag
            raise
        raise error.named(flag) from error


def path_name(text: str) -> str:
    """The name of a file or directory. The empty string is refused: it would mean the current directory."""
    if not text:
        raise argparse.ArgumentTypeError("found '', allowed the name of a file or directory")
    return text


def whole_number(minimum: int) -> Callable[[str], int]:
    """A parser for integers >= `minimum`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:  # also raised for numbers with thousands of digits
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"found {text[:40]!r}, allowed a whole number >= {minimum}")
        return value

    return parse


def integer(text: str) -> int:
    """An integer. Its range is checked where it is used."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"found {text[:40]!r}, allowed an integer") from None


def any_number(text: str) -> float:
    """A decimal number. Its range is checked where it is used."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"found {text[:40]!r}, allowed a number") from None


def number(*, above: float | None = None, minimum: float | None = None, maximum: float) -> Callable[[str], float]:
    """A parser for decimal numbers `<= maximum`, and `>= minimum` or `> above`."""
    lower = f"> {above}" if above is not None else f">= {minimum}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        # NaN fails every comparison.
        if not ((above is None or value > above) and (minimum is None or value >= minimum) and value <= maximum):
            raise argparse.ArgumentTypeError(f"found {text[:40]!r}, allowed a number {lower} and <= {maximum}")
        return value

    return parse


def id_list(text: str) -> tuple[int, ...]:
    """Token ids from text with commas between them."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= 18 for part in parts):
        raise argparse.ArgumentTypeError(
            f"found {text[:40]!r}, allowed token ids with commas between them, as in 5,17,3"
        )
    return tuple(int(part) for part in parts)


def template_var(text: str) -> tuple[str, Any]:
    """Name and value of `NAME=VALUE`. VALUE is JSON, or `True`, `False` or `None`, or else text.

    `False` has to be read as a constant, because a template takes any text for true.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"found {text[:40]!r}, allowed NAME=VALUE, as in enable_thinking=false")
    constants = {"True": True, "False": False, "None": None}
    if value in constants:
        return name, constants[value]
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value
