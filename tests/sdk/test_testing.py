"""The doubles: a clock that never waits, and what a turn itself costs."""

from __future__ import annotations

import asyncio
import statistics
import time

import pytest

import paceline
from paceline.errors import InvalidValueError
from paceline.ledger import Ledger
from paceline.testing import ManualClock, ScriptedBackend


def test_sleepers_wake_in_order_without_waiting():
    """Tasks that sleep side by side overlap, and wake by their times."""
    clock = ManualClock()
    woken = []

    async def sleep(seconds):
        await clock.sleep(seconds)
        woken.append((seconds, clock() - 1000))

    async def main():
        await asyncio.gather(*(sleep(seconds) for seconds in (300.0, 100.0, 200.0)))

    asyncio.run(main())
    assert woken == [(100.0, 100.0), (200.0, 200.0), (300.0, 300.0)]


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_a_manual_clock_never_goes_back(seconds):
    """Only steps forward are taken."""
    with pytest.raises(InvalidValueError):
        ManualClock().advance(seconds)


def test_the_ledger_counts_down_and_goes_below_zero():
    """E2E runs from the opening, TTFT from the call; a call's own deadline never outlasts the turn's."""
    clock = ManualClock()
    ledger = Ledger(paceline.SLO(ttft_ms=200, e2e_ms=1000), opened_at_s=clock(), clock=clock)
    clock.advance(0.4)
    called_at_s = clock()
    clock.advance(0.05)
    assert ledger.left(called_at_s=called_at_s).ttft_ms == pytest.approx(150)
    assert ledger.left(called_at_s=called_at_s).e2e_ms == pytest.approx(550)
    assert ledger.left(paceline.SLO(e2e_ms=100), called_at_s=called_at_s).e2e_ms == pytest.approx(50)
    assert ledger.left(paceline.SLO(e2e_ms=9999), called_at_s=called_at_s).e2e_ms == pytest.approx(550)
    clock.advance(1)
    assert ledger.remaining_ms() == pytest.approx(-450)


def test_a_turn_costs_little():
    """Policy, turn and spans without a provider cost a few milliseconds, and a chunk next to nothing."""
    backend = ScriptedBackend("w " * 20, prefill_ms=0, tpot_ms=0)

    async def main():
        costs = []
        async with paceline.AsyncClient(backend=backend) as client:
            for _ in range(30):
                started = time.perf_counter()
                async with client.turn() as turn:
                    async for _ in turn.stream("hi", max_tokens=20):
                        pass
                costs.append((time.perf_counter() - started) * 1e3)
        return costs

    assert statistics.median(asyncio.run(main())) < 30
