"""Numbers of any type that callers pass."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import pytest

from paceline_engine.numeric import is_finite, is_number, plain_number


class Level(IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    ("given", "plain"), [(np.int64(2), 2), (np.float32(0.5), 0.5), (Level.HIGH, 3), (4, 4), (0.1, 0.1)]
)
def test_numbers_become_pythons_own(given: object, plain: float) -> None:
    """A number of another class becomes an equal int or float."""
    found = plain_number(given)
    assert found == plain
    assert type(found) is type(plain)


@pytest.mark.parametrize("given", [True, "2", None, [1], 1j])
def test_what_is_no_number_stays_as_it_is(given: object) -> None:
    """A bool, a text and the like are left for the check that names the field."""
    assert plain_number(given) is given
    assert not is_number(given)


def test_an_int_too_large_for_a_float_is_not_finite() -> None:
    """It is refused like infinity, and raises nothing."""
    assert is_finite(1e308)
    assert not is_finite(10**400)
    assert not is_finite(float("inf"))
