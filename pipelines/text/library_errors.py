"""Errors of the tokenizer library as errors of this package."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from dspark_jax.speculators_common.errors import DSparkError

_OURS = (DSparkError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError)


@contextlib.contextmanager
def library_errors_as(wrapped: Callable[[str], DSparkError]) -> Iterator[None]:
    """Raise `wrapped(message)` for whatever the library raises in the body.

    It raises plain `Exception`s, and where its Rust code panics an exception that is no `Exception`.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, _OURS):
            raise
        lines = str(error).splitlines() or [type(error).__name__]
        raise wrapped(lines[0]) from error
