"""The `dspark` command: runs a subcommand and turns errors into an exit status.

A subcommand is a module with `add_parser(subparsers)` and `run(args)`. Only the requested one is imported, so that
`dspark --help` is fast.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NoReturn

from dspark_jax.speculators_common.errors import DSparkError, cut_message
from dspark_jax.speculators_common.version import version

# name -> (module, its line in `dspark --help`)
COMMANDS = {
    "generate": ("dspark_jax.pipelines.commands.generate", "generate text; with a draft faster, and the same text"),
    "info": ("dspark_jax.pipelines.commands.info", "say what a checkpoint is, and whether a draft fits a target"),
    "convert": ("dspark_jax.pipelines.commands.convert", "write a draft in the other published format"),
    "bench": ("dspark_jax.pipelines.commands.bench", "plain against speculative decoding, in one process"),
}
BAD_INPUT = 2
# The values that a shell reports for these signals: 128 + SIGINT, 128 + SIGPIPE.
INTERRUPTED, BROKEN_PIPE = 130, 141


class _Parser(argparse.ArgumentParser):
    """Accepts no abbreviated flags: a new flag could change what an abbreviation means."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Exit with one line, as for every other bad input, instead of argparse's usage text."""
        self.exit(BAD_INPUT, f"dspark: error: {_line(message)}\n")


class _Version(argparse.Action):
    """Looks the version up when it is asked for, not whenever a parser is made."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(f"dspark-jax {version()}")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `dspark` with `arguments`, those of the process by default; returns the exit status.

    Wrong arguments raise `SystemExit(2)`.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        with _some_stdout():
            status = _run(arguments)
            sys.stdout.flush()
            return status
    except DSparkError as error:
        print(f"dspark: error: {_line(str(error))}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:
        _discard_stdout()
        return BROKEN_PIPE
    except OSError as error:  # a path that the system refuses, for example because it is too long
        message = f"{error.filename or 'input or output'}: {error.strerror or error}"
        print(f"dspark: error: {_line(message)}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED


def _line(message: str) -> str:
    """The message as one line of bounded length."""
    return cut_message(" ".join(message.splitlines()))


@contextlib.contextmanager
def _some_stdout() -> Iterator[None]:
    """The null device as stdout, if the caller closed stdout: then Python has none."""
    if sys.stdout is not None:
        yield
        return
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        yield


def _run(arguments: Sequence[str]) -> int:
    # A terminal that cannot show a character of the text must not end the program.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    name = next((argument for argument in arguments if not argument.startswith("-")), None)
    module = importlib.import_module(COMMANDS[name][0]) if name in COMMANDS else None
    args = _parser(module, name).parse_args(arguments)
    assert module is not None  # argparse refuses unknown commands
    return int(module.run(args) or 0)


def _parser(module: ModuleType | None, chosen: str | None) -> argparse.ArgumentParser:
    parser = _Parser(prog="dspark", description="DSpark speculative decoding for JAX.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    subparsers = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands", parser_class=_Parser
    )
    for name, (_, summary) in COMMANDS.items():
        if module is not None and name == chosen:
            module.add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser


def _discard_stdout() -> None:
    """Redirect stdout to the null device. Python flushes stdout on exit and would report the broken pipe."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
