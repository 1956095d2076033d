"""Non-negative least squares."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


def nnls(a: FloatArray, b: FloatArray) -> FloatArray:
    """The x >= 0 that minimizes ||a x - b||, by the active-set method of Lawson and Hanson.

    Source: Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23, algorithm NNLS.
    Columns are scaled to unit length first, so that features of any magnitude condition equally.

    Args:
        a: [rows, columns].
        b: [rows].
    """
    lengths = np.linalg.norm(a, axis=0)
    lengths[lengths == 0] = 1.0
    scaled = a / lengths
    n_columns = a.shape[1]
    x = np.zeros(n_columns)
    passive = np.zeros(n_columns, dtype=bool)
    tolerance = 1e-10 * max(float(np.abs(scaled.T @ b).max(initial=0.0)), 1e-300)
    for _ in range(3 * n_columns):
        gradient = scaled.T @ (b - scaled @ x)
        gradient[passive] = -np.inf
        if passive.all() or gradient.max() <= tolerance:
            break
        passive[int(gradient.argmax())] = True
        x = _inner(scaled, b, x, passive)
    solution: FloatArray = x / lengths
    return solution


def _inner(a: FloatArray, b: FloatArray, x: FloatArray, passive: NDArray[np.bool_]) -> FloatArray:
    """Solve on the passive set; step back to the boundary until the solution is non-negative."""
    while passive.any():
        solution = np.zeros_like(x)
        solution[passive] = np.linalg.lstsq(a[:, passive], b, rcond=None)[0]
        blocking = passive & (solution <= 0)
        if not blocking.any():
            return solution
        steps = x[blocking] / np.maximum(x[blocking] - solution[blocking], 1e-300)
        x = np.maximum(x + float(steps.min()) * (solution - x), 0.0)
        passive &= x > 1e-15 * max(float(x.max()), 1e-300)
    return np.zeros_like(x)
