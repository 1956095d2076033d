from __future__ import annotations

import itertools
import math

import pytest

from paceline_engine.speculate.length import Outlook, Pace


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


def test_what_a_stream_bears() -> None:
    """A target that the plain step keeps is a limit, times the tokens of a step; one that it breaks lets the
    step become twice as long, or as long as pays where the stream drafts itself."""
    assert Pace(target_s=0.05).limit_s(0.04) == 0.05
    assert Pace(target_s=0.05, tokens_per_step=2.0, drafts=True).limit_s(0.04) == pytest.approx(0.1)
    assert Pace(target_s=0.05).limit_s(0.06) == pytest.approx(0.12)
    assert Pace(target_s=0.05, drafts=True).limit_s(0.06) == math.inf
    assert Pace(target_s=0.05).limit_s(math.inf) == math.inf


def test_drafts_end_at_the_limit() -> None:
    """However well they pay, no more drafts are made than the step has time for."""
    start = Outlook(tokens=1, seconds=0.06, plain_s=0.06)
    limit_s = start.limit_s([Pace(target_s=0.3), Pace(target_s=0.091)])
    found, count = start.after([0.99] * 8, 0.01, limit_s=limit_s)
    assert count == 3
    assert found.seconds == pytest.approx(0.09)
    assert start.after([0.99] * 8, 0.01)[1] == 8
    assert start.limit_s([]) == math.inf
