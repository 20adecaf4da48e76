"""Errors caused by input. Each is one line: the file, the field, the value found and the values allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

AnyError = TypeVar("AnyError", bound="DSparkError")
_MAX_SHOWN = 500  # characters of one value
_MAX_MESSAGE = 2000  # characters of one error line, whatever the file holds
_MAX_FAULTS = 5  # faults that a collected error lists
_MAX_FAULTS_OF_A_KIND = 3  # of each kind, where there are several


class _Unstated:
    """Marks that the field is missing. `None` is a value that a file can state (null)."""

    def __repr__(self) -> str:
        return "nothing"


UNSTATED: object = _Unstated()


class DSparkError(ValueError):
    """Base of every error caused by input. The command line prints it without a traceback and exits with 2.

    `file` is the file or another place, `field` the field, `found` its value, `allowed` the values allowed. `str()` is
    `file: field: found X, allowed Y`, or `file: field: missing, allowed Y` without `found`. A `detail` replaces the
    part after the field. Callers that need to know what is wrong read the attributes; nothing parses the text.
    """

    def __init__(
        self,
        detail: str = "",
        *,
        file: Path | str = "",
        field: str = "",
        found: object = UNSTATED,
        allowed: object = "",
    ) -> None:
        self.file, self.field, self.found, self.allowed = str(file), field, found, allowed
        self.detail = detail or _detail(found, allowed)
        super().__init__(cut_message(": ".join(part for part in (self.file, field, self.detail) if part)))

    def at(self: AnyError, place: str) -> AnyError:
        """The same error with `place` in front of its file, for example the line of a prompts file."""
        file = f"{place}: {self.file}" if self.file else place
        return type(self)(self.detail, file=file, field=self.field, found=self.found, allowed=self.allowed)

    def named(self: AnyError, field: str) -> AnyError:
        """The same error under another field name, for example that of the flag that sets the field."""
        return type(self)(self.detail, file=self.file, field=field, found=self.found, allowed=self.allowed)


class CheckpointError(DSparkError):
    """A checkpoint directory or file cannot be used as it is."""


class PairError(DSparkError):
    """A draft and a target cannot work together."""


class RequestError(DSparkError):
    """A generation request cannot be served: prompt, budget, stop ids or option."""


def shown(value: object) -> str:
    """The `repr` of `value` for a message, cut to 500 characters. Never raises, whatever a file holds."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply; an integer of too many digits
        return f"{type(value).__name__}, too deep or too long to show"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text)} characters)"


def field_error(file: Path | str, field: str, found: object, allowed: object) -> CheckpointError:
    """The error for a checkpoint file's field with a value that is not allowed; the caller raises it."""
    return CheckpointError(file=file, field=field, found=found, allowed=allowed)


def missing_field(file: Path | str, field: str, allowed: object) -> CheckpointError:
    """The error for a field that a checkpoint file must state and does not; the caller raises it."""
    return CheckpointError(file=file, field=field, allowed=allowed)


def collected_error(file: Path | str, faults: Sequence[str] | Mapping[str, Sequence[str]]) -> CheckpointError:
    """One error for all faults of one file: the first few faults, and the number of further ones.

    A mapping groups the faults by kind. Then the first few of every kind are listed, so that many faults of one kind do
    not hide another kind. The caller raises the error.
    """
    kinds = faults if isinstance(faults, Mapping) else {"": faults}
    kinds = {kind: list(texts) for kind, texts in kinds.items() if texts}
    share = _MAX_FAULTS if len(kinds) <= 1 else _MAX_FAULTS_OF_A_KIND
    room = max(_MAX_MESSAGE // 2, _MAX_MESSAGE - len(str(file)) - 200)  # the rest is left for the counts
    each = room // max(1, sum(min(share, len(texts)) for texts in kinds.values()))
    parts = []
    for kind, texts in kinds.items():
        parts += [text if len(text) <= each else f"{text[: each - 3]}..." for text in texts[:share]]
        if len(texts) > share:
            parts.append(f"and {len(texts) - share} more" + (f" {kind}" if len(kinds) > 1 else ""))
    return CheckpointError("; ".join(parts), file=file)


def install_hint(package: str, extra: str) -> str:
    """How to install `package`, which the extra `extra` of this project needs: by itself, with the installed project,
    and in a checkout. The end of an error message.
    """
    return (
        f"pip install {package} (or the extra: pip install 'dspark-jax[{extra}]', in a checkout pip install -e "
        f"'.[{extra}]')"
    )


def _detail(found: object, allowed: object) -> str:
    what = "missing" if found is UNSTATED else f"found {shown(found)}"
    return what + (f", allowed {allowed}" if str(allowed) else "")


def cut_message(message: str) -> str:
    """`message`, cut in the middle to at most `_MAX_MESSAGE` characters."""
    if len(message) <= _MAX_MESSAGE:
        return message
    half = _MAX_MESSAGE // 2 - 40
    return f"{message[:half]} ... ({len(message) - 2 * half} characters left out) ... {message[-half:]}"
