"""Scales that follow a machine's speed."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

_RATE = 0.3
"""Weight of the newest value: 90% of a lasting change is taken up after seven generations."""
_WIDEST = math.log(50.0)


class Drift:
    """An exponentially weighted scale, fed by ratios measured / predicted by the fit alone.

    The logarithm of the scale moves by ``_RATE`` towards the median of the last three ratios, so one
    outlier of any size does not move it at all, and a lasting change does from its second value on.
    """

    __slots__ = ("_recent", "log_scale")

    def __init__(self, scale: float = 1.0) -> None:
        self.log_scale = math.log(scale)
        self._recent: deque[float] = deque([self.log_scale] * 2, maxlen=3)

    @property
    def scale(self) -> float:
        return math.exp(self.log_scale)

    def observe(self, ratio: float) -> None:
        if not (math.isfinite(ratio) and ratio > 0):
            return
        self._recent.append(min(max(math.log(ratio), -_WIDEST), _WIDEST))
        self.log_scale += _RATE * (median(self._recent) - self.log_scale)


class Pause:
    """An exponentially weighted duration, with the same filter of three."""

    __slots__ = ("_recent", "seconds")

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self._recent: deque[float] = deque([seconds] * 2, maxlen=3)

    def observe(self, seconds: float) -> None:
        if math.isfinite(seconds):
            self._recent.append(max(0.0, seconds))
            self.seconds += _RATE * (median(self._recent) - self.seconds)
