"""Argument types that subcommands share: one value in, one clear sentence out if it does not fit."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def whole_number(minimum: int) -> Callable[[str], int]:
    """An integer from `minimum` on."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:  # also a number of thousands of digits
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"found {text[:40]!r}, allowed a whole number >= {minimum}")
        return value

    return parse


def number(*, above: float | None = None, minimum: float | None = None, maximum: float) -> Callable[[str], float]:
    """A decimal number up to `maximum`, from `minimum` on or above `above`."""
    lower = f"> {above}" if above is not None else f">= {minimum}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not ((above is None or value > above) and (minimum is None or value >= minimum) and value <= maximum):  # NaN fails too
            raise argparse.ArgumentTypeError(f"found {text[:40]!r}, allowed a number {lower} and <= {maximum}")
        return value

    return parse


def id_list(text: str) -> tuple[int, ...]:
    """Token ids with commas between them."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= 18 for part in parts):
        raise argparse.ArgumentTypeError(f"found {text[:40]!r}, allowed token ids with commas between them, as in 5,17,3")
    return tuple(int(part) for part in parts)
