"""Numbers that callers pass, whatever type they came in."""

from __future__ import annotations

import math
from numbers import Integral, Real


def plain_number(value: object) -> object:
    """A number as an ``int`` or ``float`` of Python's own; anything else, and a bool, as it is.

    NumPy's scalars, ``IntEnum`` and the like are numbers to whoever passes them, and their classes need
    not be known where the number goes.
    """
    if isinstance(value, bool) or type(value) in (int, float):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def is_number(value: object) -> bool:
    """Whether it is an ``int`` or ``float``, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_whole(value: object) -> bool:
    """Whether it is an ``int``, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    """Whether it is a number, no bool, and finite as a ``float``: an ``int`` may be too large for one."""
    try:
        return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    except OverflowError:
        return False
