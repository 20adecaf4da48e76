"""`dspark info`: describes checkpoints, and says whether a draft fits a target."""

from __future__ import annotations

import argparse
import json
from typing import Any

from dspark_jax.pipelines.commands.arguments import (
    DRAFT_METAVAR,
    TARGET_METAVAR,
    add_draft_overrides,
    draft_overrides,
    path_name,
    refuse_overrides,
)
from dspark_jax.speculators_common.errors import DSparkError, PairError, RequestError


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add `info` to the result of `ArgumentParser.add_subparsers`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "info",
        help="say what a checkpoint is, and whether a draft fits a target",
        description=(
            "Describe checkpoints from their configs and file headers, checked as strictly as for running "
            "them; no weights are read."
        ),
    )
    parser.add_argument(
        "checkpoints",
        nargs="*",
        type=path_name,
        metavar="DIR",
        help="a target or a draft; also a Hugging Face id, a .gguf file or smollm2",
    )
    parser.add_argument(
        "--target", type=path_name, metavar=TARGET_METAVAR, help="a target; with --draft, also say whether the two fit"
    )
    parser.add_argument("--draft", type=path_name, metavar=DRAFT_METAVAR, help="a draft")
    add_draft_overrides(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def run(args: argparse.Namespace) -> int:
    """Describe and print; returns the exit status.

    Raises one `DSparkError` for all faults, after the checkpoints without a fault are described.
    """
    if not args.checkpoints and args.target is None and args.draft is None:
        raise RequestError(
            "found no checkpoint, allowed directories, --target or --draft",
            field="info",
            allowed="directories, --target or --draft",
        )
    # Imported here because jax takes a second to import: wrong arguments are refused before that.
    from dspark_jax.pipelines.checkpoints.description import (
        Description,
        check_described_pair,
        describe,
        description_json,
        description_lines,
    )

    overrides = draft_overrides(args)
    found: list[Description] = []
    faults: list[DSparkError] = []

    def add(path: str, kind: str | None = None) -> Description | None:
        try:
            found.append(describe(path, kind=kind, overrides=overrides))
        except DSparkError as error:
            faults.append(error)
            return None
        return found[-1]

    for path in args.checkpoints:
        add(path)
    target = None if args.target is None else add(args.target, "target")
    draft = None if args.draft is None else add(args.draft, "draft")
    if not faults and all(description.entry.kind != "draft" for description in found):
        refuse_overrides(overrides)
    pair: dict[str, Any] | None = None
    if target is not None and draft is not None:
        try:
            check_described_pair(target, draft)
            pair = {"fits": True, "reason": None}
        except PairError as error:
            faults.append(error)
            pair = {"fits": False, "reason": str(error)}
    if args.json and found:
        print(json.dumps({"checkpoints": [description_json(description) for description in found], "pair": pair}))
    elif found:
        print("\n\n".join("\n".join(description_lines(description)) for description in found))
        if pair is not None and pair["fits"]:
            print("\nthe draft fits the target")
    if faults:
        raise DSparkError("; ".join(map(str, faults)))
    return 0
