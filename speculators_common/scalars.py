"""What counts as an integer and as a number, in config files and in arguments."""

from __future__ import annotations

import numbers
from typing import Any


def is_integer(value: object) -> bool:
    """Whether `value` is an integer, of Python or numpy; a bool is none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether `value` is a real number, of Python or numpy; a bool is none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def plain(value: Any) -> Any:
    """Scalars of numpy as those of Python, in tuples too; anything else unchanged.

    Sums of small numpy integers wrap around.
    """
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    # Commands that only show their help must not wait for numpy.
    return value.item() if type(value).__module__ == "numpy" and hasattr(type(value), "item") else value
