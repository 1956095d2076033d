"""The modes that the matrix goes through."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any


def test_every_pair_of_settings_occurs(every_case: list[Any]) -> None:
    """Any two settings of different kinds are tried together, in one mode or more."""
    names = [item.name for item in dataclasses.fields(every_case[0])]
    for one, two in itertools.combinations(names, 2):
        pairs = {(getattr(case, one), getattr(case, two)) for case in every_case}
        ones, twos = ({getattr(case, name) for case in every_case} for name in (one, two))
        assert pairs == set(itertools.product(ones, twos)), (one, two)
