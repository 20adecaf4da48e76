"""`dspark convert`: writes a draft in the other published format. All messages go to stderr."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from dspark_jax.pipelines.commands.arguments import TARGET_METAVAR, path_name
from dspark_jax.speculators_common.formats.conversions import FORMATS
from dspark_jax.speculators_common.formats.draft_config import DraftOverrides

_EPILOG = """\
Drafts of the Qwen3 style go both ways: DeepSpec Qwen3, its DFlash baselines included, to speculators;
speculators DSpark and DFlash to DeepSpec if they are anchor-first, over the whole vocabulary, and all layers
are full and bidirectional. z-lab DFlash goes to speculators if it scales, caps and windows nothing. DeepSpec
Gemma4 and compact drafts have no counterpart.

Tensors keep their bits and dtypes. Before DST appears, both drafts are loaded and must agree bit for bit in
every parameter and in what they draft.
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add `convert` to the result of `ArgumentParser.add_subparsers`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "convert",
        help="write a draft in the other published format",
        description=(
            "Write the draft in SRC to the new directory DST in another format, and check that both draft the same."
        ),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SRC", type=path_name, help="a draft: a directory or a Hugging Face id")
    parser.add_argument("destination", metavar="DST", type=path_name, help="a directory that does not exist yet")
    parser.add_argument("--to", required=True, choices=tuple(FORMATS), help="the format of DST")
    parser.add_argument(
        "--target",
        metavar=TARGET_METAVAR,
        type=path_name,
        help=(
            "the draft's target, which supplies what SRC lacks and DST needs: to deepspec its depth, and embedding "
            "and head where SRC stores none"
        ),
    )
    parser.add_argument(
        "--target-name",
        metavar="NAME",
        help="to speculators: the target as DST names it, a Hugging Face name or a path (what SRC says, or none)",
    )
    parser.add_argument(
        "--sample-from-anchor",
        action=argparse.BooleanOptionalAction,
        help="SRC is anchor-first, or fill-in, whatever its files say",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Convert and report; returns the exit status. Raises `DSparkError` for wrong input."""
    from dspark_jax.pipelines.checkpoints.conversion import convert_draft

    overrides = None if args.sample_from_anchor is None else DraftOverrides(sample_from_anchor=args.sample_from_anchor)
    done = convert_draft(
        args.source, args.destination, args.to, target=args.target, target_name=args.target_name, overrides=overrides
    )
    for note in done.notes:
        print(note, file=sys.stderr)
    print(f"wrote {args.destination}: {done.config.architecture}, {done.num_tensors} tensors", file=sys.stderr)
    print(
        f"checked: {done.num_parameters} parameters and the drafts of one block are those of {args.source}, bit for "
        "bit",
        file=sys.stderr,
    )
    return 0
