"""Errors that a user can cause and mend: one line that names the file, the field, what was found and what is
allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_MAX_SHOWN = 500


class DSparkError(ValueError):
    """Base of every error caused by input. The command line prints it without a traceback and exits with 2."""


class CheckpointError(DSparkError):
    """A checkpoint directory or file cannot be used as it is."""


class PairError(DSparkError):
    """A draft and a target cannot work together."""


class RequestError(DSparkError):
    """A generation request cannot be served: prompt, budget, stop ids or option."""


def shown(value: object) -> str:
    """`value` for a message: its `repr`, cut short where that is long. Never fails, whatever a file may hold."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply; an integer of too many digits
        return f"{type(value).__name__}, too deep or too long to show"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text)} characters)"


def field_error(file: Path | str, field: str, found: object, allowed: object) -> CheckpointError:
    """`file: field: found X, allowed Y` as one line."""
    return CheckpointError(f"{file}: {field}: found {shown(found)}, allowed {allowed}")


def missing_field(file: Path | str, field: str, allowed: object) -> CheckpointError:
    """`file: field: missing, allowed Y` as one line."""
    return CheckpointError(f"{file}: {field}: missing, allowed {allowed}")


def collected_error(file: Path | str, faults: Sequence[str]) -> CheckpointError:
    """All faults of one file together, so that a user mends them in one go."""
    return CheckpointError(f"{file}: " + "; ".join(faults))
