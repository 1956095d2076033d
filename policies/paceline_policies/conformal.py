"""Quantiles and probabilities from recent errors, not from hope: split conformal prediction.

A sample is the ratio measured / predicted of TTFT, TPOT and E2E of one generation. With n samples in
ascending order, the q-quantile of the next ratio is the sample of rank ceil((n + 1) · q): if the next one
is exchangeable with them, it stays below with probability q or more, whatever the distribution
(Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World, 2005; Lei et al., Distribution-Free
Predictive Inference for Regression, 2018). Beyond the largest sample the formula has no answer; there
a power tail goes on: P(ratio > x) = (largest / x)³ / (n + 1).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
Sample = tuple[float, float | None, float]
"""Measured divided by predicted: TTFT, TPOT (None where nothing was decoded), E2E."""

TAIL_EXPONENT = 3.0


class Errors:
    """Samples of prediction errors, ready for quantiles. Unchanging."""

    __slots__ = ("_decoded", "_first", "_quantiles", "_ttft", "_weights")

    def __init__(
        self,
        samples: Sequence[Sample] | FloatArray,
        weights: FloatArray | None = None,
        *,
        first: Errors | None = None,
    ) -> None:
        """``samples`` must not be empty.

        Args:
            samples: of past generations; an array has the three ratios of each in a row.
            weights: how much each says of the next one, 1 for one that is exchangeable with it; the
                default is 1 for all.
            first: what the quantiles of TTFT by itself are taken from, where more is known of it.
        """
        if weights is None:
            weights = np.ones(len(samples))
        ttft = np.array([sample[0] for sample in samples], dtype=np.float64)
        # Rows of [TTFT, TPOT, E2E]; a generation that decoded nothing says nothing of decoding.
        decoded = [index for index, sample in enumerate(samples) if sample[1] is not None]
        if decoded:
            rows = np.array([samples[index] for index in decoded], dtype=np.float64)
        else:
            decoded = list(range(len(samples)))
            rows = np.array([(sample[0], 1.0, sample[2]) for sample in samples])
        self._first = first
        self._ttft: FloatArray = ttft
        self._decoded: FloatArray = rows
        self._weights = (weights, weights[decoded])
        self._quantiles: dict[float, tuple[float, float, float]] = {}
        """Those that were asked for: every decision asks for the same few."""

    def ttft(self, q: float) -> float:
        """Quantile of the TTFT ratio."""
        return self._at(q)[0]

    def tpot(self, q: float) -> float:
        """Quantile of the TPOT ratio."""
        return self._at(q)[1]

    def e2e(self, q: float) -> float:
        """Quantile of the E2E ratio."""
        return self._at(q)[2]

    def _at(self, q: float) -> tuple[float, float, float]:
        """The q-quantiles of TTFT, TPOT and E2E."""
        if (found := self._quantiles.get(q)) is None:
            decoded, (weights, decoded_weights) = self._decoded, self._weights
            found = (
                quantile(self._ttft, weights, q) if self._first is None else self._first.ttft(q),
                quantile(decoded[:, 1], decoded_weights, q),
                quantile(decoded[:, 2], decoded_weights, q),
            )
            self._quantiles[q] = found
        return found

    def p_meet(
        self, *, points: tuple[float, float | None, float], limits: tuple[float, float, float]
    ) -> float:
        """Probability that every budget is met at once.

        Each sample says how all durations of one generation erred together, so its worst overshoot,
        the maximum over the budgets of ratio · predicted / limit, is one number whose conformal
        probability of being at most 1 is the joint probability; no bound over separate budgets is
        needed.

        Args:
            points: predicted TTFT, TPOT and E2E in ms; TPOT None where at most one token is made,
                then E2E is TTFT.
            limits: the budgets in ms; infinite where there is none.
        """
        if min(limits) <= 0:
            return 0.0
        overshoot, weights = self._overshoot(points, limits)
        total, over = float(weights.sum()), overshoot > 1.0
        if over.any():
            return float(weights[~over].sum()) / (total + 1)
        return 1.0 - math.pow(float(overshoot.max()), TAIL_EXPONENT) / (total + 1)

    def median_overshoot(
        self, *, points: tuple[float, float | None, float], limits: tuple[float, float, float]
    ) -> float:
        """The median of the worst overshoot: 1.5 is half over. Arguments as ``p_meet``, limits above 0."""
        return quantile(*self._overshoot(points, limits), 0.5)

    def _overshoot(
        self, points: tuple[float, float | None, float], limits: tuple[float, float, float]
    ) -> tuple[FloatArray, FloatArray]:
        """Each sample's worst overshoot, and its weight."""
        if points[1] is None:
            return self._ttft * (points[0] / min(limits[0], limits[2])), self._weights[0]
        ratios = self._decoded
        ttft = ratios[:, 0] * points[0]
        e2e = np.maximum(ratios[:, 2] * points[2], ttft)
        overshoot = np.maximum(ttft / limits[0], e2e / limits[2])
        if math.isfinite(limits[1]):
            overshoot = np.maximum(overshoot, ratios[:, 1] * (points[1] / limits[1]))
        return overshoot, self._weights[1]


def quantile(values: FloatArray, weights: FloatArray, q: float) -> float:
    """The conformal quantile of weighted samples; the median for q = 0.5.

    The next value has weight 1 beside theirs (Tibshirani et al., Conformal Prediction Under Covariate
    Shift, 2019).
    """
    order = np.argsort(values, kind="stable")
    ascending, sums = values[order], np.cumsum(weights[order])
    total, last = float(sums[-1]), len(values) - 1
    if q == 0.5:
        low, high = np.searchsorted(sums, (total / 2 - 1e-9, total / 2 + 1e-9)).tolist()
        return float(ascending[min(low, last)] + ascending[min(high, last)]) / 2
    wanted = (total + 1) * q
    if wanted <= total + 1e-9:
        return float(ascending[min(int(np.searchsorted(sums, wanted - 1e-9)), last)])
    # A confidence next to 1 may have been rounded to it.
    beyond = max(1.0 - q, sys.float_info.epsilon)
    return float(ascending[-1]) * math.pow(1.0 / ((total + 1) * beyond), 1.0 / TAIL_EXPONENT)


def assumed_samples(n: int, *, log_deviation: float) -> list[Sample]:
    """n samples of a log-normal error of median 1, evenly spaced in probability.

    They stand in while too few generations were measured. All three ratios of a sample are alike: what
    slows one phase of a machine slows the others.
    """
    ratios = [math.exp(log_deviation * each) for each in _normal_quantiles(n)]
    return [(ratio, ratio, ratio) for ratio in ratios]


@lru_cache(maxsize=64)
def _normal_quantiles(n: int) -> tuple[float, ...]:
    """n values of the standard normal distribution, evenly spaced in probability."""
    normal = NormalDist()
    return tuple(normal.inv_cdf((i + 0.5) / n) for i in range(n))


def log_spread(samples: Sequence[Sample]) -> float:
    """Robust standard deviation of the logarithm of the E2E ratios (from the median absolute deviation)."""
    if len(samples) < 2:
        return 0.0
    logs = np.log([sample[2] for sample in samples])
    return 1.4826 * float(np.median(np.abs(logs - np.median(logs))))
