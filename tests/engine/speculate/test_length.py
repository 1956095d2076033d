from __future__ import annotations

import itertools

import pytest

from paceline_engine.speculate.length import Outlook


@pytest.mark.parametrize("acceptance", [0.02, 0.3, 0.6, 0.9, 0.99])
@pytest.mark.parametrize("seconds_each", [0.005, 0.02, 0.05, 0.2])
@pytest.mark.parametrize("streams", [1, 4])
def test_the_length_chosen_is_the_best(acceptance: float, seconds_each: float, streams: int) -> None:
    """No other number of drafts gives more tokens per second."""
    start = Outlook(tokens=streams, seconds=0.06)

    def rate(count: int) -> float:
        gain = sum(itertools.accumulate([acceptance] * count, lambda a, b: a * b))
        return (streams + gain) / (0.06 + count * seconds_each)

    found, count = start.after([acceptance] * 12, seconds_each)
    assert found.rate == pytest.approx(max(rate(n) for n in range(13)))
    assert found.rate == pytest.approx(rate(count))
    assert (start.tokens, start.seconds) == (streams, 0.06)


def test_useless_drafts_are_not_made() -> None:
    """Drafts that cost more than they bring leave the step as it is."""
    assert Outlook(tokens=1, seconds=0.06).after([0.4] * 4, 0.03)[1] == 0
