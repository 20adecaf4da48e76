"""What counts as an integer and as a number, in config files and in arguments."""

from __future__ import annotations

import numbers


def is_integer(value: object) -> bool:
    """Whether `value` is an integer, of Python or numpy; a bool is none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether `value` is a real number, of Python or numpy; a bool is none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
