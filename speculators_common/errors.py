"""Errors that a user can cause and mend: one line that names the file, the field, what was found and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class DSparkError(ValueError):
    """Base of every error caused by input. The command line prints it without a traceback and exits with 2."""


class CheckpointError(DSparkError):
    """A checkpoint directory or file cannot be used as it is."""


class PairError(DSparkError):
    """A draft and a target cannot work together."""


class RequestError(DSparkError):
    """A generation request cannot be served: prompt, budget, stop ids or option."""


def field_error(file: Path | str, field: str, found: object, allowed: object) -> CheckpointError:
    """`file: field: found X, allowed Y` as one line."""
    return CheckpointError(f"{file}: {field}: found {found!r}, allowed {allowed}")


def missing_field(file: Path | str, field: str, allowed: object) -> CheckpointError:
    """`file: field: missing, allowed Y` as one line."""
    return CheckpointError(f"{file}: {field}: missing, allowed {allowed}")


def collected_error(file: Path | str, faults: Sequence[str]) -> CheckpointError:
    """All faults of one file together, so that a user mends them in one go."""
    return CheckpointError(f"{file}: " + "; ".join(faults))
