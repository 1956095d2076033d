from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_policies.nnls import nnls


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 20))
def test_solution_is_optimal(seed: int, columns: int, rows: int) -> None:
    """The solution meets the Karush-Kuhn-Tucker conditions, also where columns outnumber rows."""
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(rows, columns)), rng.normal(size=rows)
    x = nnls(a, b)
    gradient = a.T @ (a @ x - b)
    assert (x >= 0).all()
    assert gradient.min() >= -1e-7
    assert abs(gradient @ x) <= 1e-6


def test_recovers_exact_coefficients_of_any_magnitude() -> None:
    """Columns whose scales differ by nine orders are recovered alike."""
    rng = np.random.default_rng(0)
    a = np.abs(rng.normal(size=(40, 3))) * np.array([1.0, 1e3, 1e9])
    truth = np.array([0.02, 1e-3, 0.0])
    assert nnls(a, a @ truth) == pytest.approx(truth, abs=1e-15, rel=1e-6)


def test_degenerate_columns() -> None:
    """Zero columns get 0 and identical columns share without failing."""
    a = np.array([[0.0, 1.0, 1.0], [0.0, 2.0, 2.0]])
    x = nnls(a, np.array([1.0, 2.0]))
    assert x[0] == 0
    assert x[1] + x[2] == pytest.approx(1.0)
    assert nnls(a, np.zeros(2)) == pytest.approx(0.0)
