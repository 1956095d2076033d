from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_policies.conformal import Errors, FloatArray, assumed_samples, log_spread
from paceline_policies.conformal import quantile as weighted_quantile

ratios = st.floats(min_value=0.05, max_value=20)
samples = st.lists(st.tuples(ratios, st.none() | ratios, ratios), min_size=1, max_size=40)
POINTS = (100.0, 10.0, 500.0)


def quantile(ascending: FloatArray, q: float) -> float:
    return weighted_quantile(ascending, np.ones(len(ascending)), q)


def test_rank_has_the_finite_sample_correction() -> None:
    """Of 19 samples the 0.9 quantile is the 18th, not the 17th; of 9 it is the largest."""
    assert quantile(np.arange(1.0, 20.0), 0.9) == 18
    assert quantile(np.arange(1.0, 10.0), 0.9) == 9
    assert quantile(np.arange(1.0, 6.0), 0.5) == 3
    assert quantile(np.array([2.0, 4.0]), 0.5) == 3


def test_beyond_the_largest_sample() -> None:
    """Too few samples for a quantile give more than the largest, and the tail agrees with p(meet)."""
    errors = Errors([(1.0, 1.0, 1.0)] * 5)
    assert errors.e2e(0.99) > 1.0
    assert errors.e2e(0.99) < errors.e2e(1 - 1e-15) <= errors.e2e(1.0) < math.inf
    limit = 500.0 * errors.e2e(0.99)
    p = errors.p_meet(points=POINTS, limits=(math.inf, math.inf, limit))
    assert p == pytest.approx(0.99)


@pytest.mark.parametrize("q", [0.5, 0.9, 0.95])
def test_coverage_holds_for_a_heavy_tail(q: float) -> None:
    """The next value of a Pareto law stays below the quantile of 40 with about the probability wanted."""
    rng = random.Random(5)
    hits = 0
    for _ in range(2000):
        seen = np.sort([rng.paretovariate(1.5) for _ in range(40)])
        hits += rng.paretovariate(1.5) <= quantile(seen, q)
    assert hits / 2000 == pytest.approx(q, abs=0.03)


@given(samples, st.sampled_from([0.8, 0.9, 0.95]))
def test_p_meet_agrees_with_the_quantile(found: list[tuple[float, float | None, float]], q: float) -> None:
    """With one budget alone, p(meet) reaches q where the budget is the q-quantile."""
    errors = Errors(found)
    for i, at in enumerate((errors.ttft(q), errors.tpot(q))):
        limits = [math.inf] * 3
        limits[i] = POINTS[i] * at * (1 + 1e-9)
        points = (POINTS[0], None, POINTS[0]) if i == 0 else POINTS
        assert errors.p_meet(points=points, limits=(limits[0], limits[1], limits[2])) >= q - 1e-6


@given(samples, st.tuples(*[st.floats(min_value=1, max_value=1e5)] * 3), st.floats(1, 10))
def test_p_meet_is_monotonic(
    found: list[tuple[float, float | None, float]], limits: tuple[float, float, float], more: float
) -> None:
    """More time never lowers p(meet), more work never raises it, and it is a probability."""
    errors = Errors(found)
    p = errors.p_meet(points=POINTS, limits=limits)
    assert 0 <= p <= 1
    raised = (limits[0] * more, limits[1] * more, limits[2] * more)
    assert errors.p_meet(points=POINTS, limits=raised) >= p - 1e-12
    slower = (POINTS[0] * more, POINTS[1] * more, POINTS[2] * more)
    assert errors.p_meet(points=slower, limits=limits) <= p + 1e-12


def test_joint_probability_uses_common_causes() -> None:
    """Budgets that are missed by the same generations cost their probability once, not three times."""
    together = Errors([(1.0, 1.0, 1.0)] * 16 + [(3.0, 3.0, 3.0)] * 3)
    apart = Errors(
        [(1.0, 1.0, 1.0)] * 10 + [(3.0, 1.0, 1.0)] * 3 + [(1.0, 3.0, 1.0)] * 3 + [(1.0, 1.0, 3.0)] * 3
    )
    limits = (200.0, 20.0, 1000.0)
    assert together.p_meet(points=POINTS, limits=limits) == pytest.approx(16 / 20)
    assert apart.p_meet(points=POINTS, limits=limits) == pytest.approx(10 / 20)


def test_spent_budget_is_never_met() -> None:
    """A budget of 0 or less has probability 0."""
    errors = Errors([(1.0, None, 1.0)])
    assert errors.p_meet(points=(1.0, None, 1.0), limits=(math.inf, math.inf, 0.0)) == 0
    assert errors.p_meet(points=POINTS, limits=(-5.0, math.inf, math.inf)) == 0


def test_zero_variance_and_spread() -> None:
    """Equal samples have that value at every quantile they reach, and no spread."""
    errors = Errors([(2.0, 2.0, 2.0)] * 20)
    assert errors.ttft(0.5) == errors.ttft(0.9) == errors.tpot(0.9) == 2.0
    assert log_spread([(2.0, 2.0, 2.0)] * 20) == 0
    assert log_spread([(2.0, 2.0, 2.0)]) == 0
    assumed = assumed_samples(400, log_deviation=0.3)
    assert log_spread(assumed) == pytest.approx(0.3, rel=0.05)
    assert np.median([each[0] for each in assumed]) == pytest.approx(1.0, rel=0.01)


def test_a_weight_counts_as_so_many_samples() -> None:
    """Weights of 2 are two samples each, of 0 none; the new one weighs 1 beside them."""
    rows = [(1.0, 1.0, 1.0), (2.0, 2.0, 2.0), (9.0, 9.0, 9.0)]
    weighted = Errors(rows, np.array([10.0, 10.0, 0.0]))
    plain = Errors([rows[0]] * 10 + [rows[1]] * 10)
    for q in (0.2, 0.5, 0.6, 0.9):
        assert weighted.tpot(q) == plain.tpot(q)
    points, limits = (1.0, 1.0, 1.0), (1.5, 1.5, 1.5)
    assert weighted.p_meet(points=points, limits=limits) == plain.p_meet(points=points, limits=limits)


def test_samples_of_little_weight_leave_p90_far_out() -> None:
    """Where hardly anything like it was seen, p90 lies beyond the largest sample."""
    rows = [(1.0, 1.0, 1.0)] * 50
    assert Errors(rows, np.full(50, 0.01)).tpot(0.9) > 1.5
    assert Errors(rows).tpot(0.9) == 1.0
