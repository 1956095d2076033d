"""What the planner makes of a snapshot."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.ledger import Ledger
from paceline.planner import Planner
from paceline.policy import Ask, Served
from paceline.testing import ManualClock, ScriptedBackend
from paceline_engine.snapshot import Snapshot
from paceline_policies.slo import SLO


def test_a_wait_for_weights_is_predicted_and_counts_as_queue() -> None:
    """It is in the first token of the variant that waits, and is blamed on the queue, not on the prefill."""
    clock = ManualClock()
    backend = ScriptedBackend("a b", clock=clock)
    planner = Planner(
        {backend.name: Served(backend=backend, info=backend.info)}, {backend.name: backend.profile}
    )
    slo = SLO(ttft_ms=None, tpot_ms=None, e2e_ms=None)
    left = Ledger(slo, opened_at_s=clock(), clock=clock).left(called_at_s=clock())
    ask = Ask(slo=slo, left=left, now_s=clock(), deadline_at_s=None, max_tokens=4)
    there = Snapshot(taken_at_s=clock(), prompt_tokens=8)
    first, *_ = backend.info.variants
    waits = replace(there, loading_s={first: 0.25})
    before = planner.decide(ask, {backend.name: there})
    assert before.plan is not None
    assert before.plan.mode.variant is first
    assert before.prediction is not None
    assert planner.queue_ms(before, there) == 0
    late = planner.decide(ask, {backend.name: waits})
    assert late.prediction is not None
    gained = late.prediction.ttft.p50_ms - before.prediction.ttft.p50_ms
    assert gained == pytest.approx(250, rel=0.3)
    assert planner.queue_ms(late, waits) == pytest.approx(gained, rel=0.3)
