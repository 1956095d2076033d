"""Scales that follow a machine's speed, and the acceptance of drafts."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from paceline_engine.mode import Drafter, Mode
from paceline_engine.timeline import Timeline

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


class Acceptance:
    """Probability that a drafted token is accepted, learned per kind of speculation.

    Before anything is known: 0.5 for self-speculation and 0.2 for n-grams. Both are below what agent
    dialogue shows, so that speculation is judged too slow rather than too fast, yet above 0, so that it
    is tried where drafts are cheap.
    """

    __slots__ = ("_rates",)

    def __init__(self, known: dict[str, float]) -> None:
        self._rates = dict(known)

    @property
    def known(self) -> dict[str, float]:
        return dict(self._rates)

    def rate(self, mode: Mode) -> float:
        if mode.speculation is None:
            return 0.0
        prior = 0.5 if mode.speculation.drafter is Drafter.SELF else 0.2
        return self._rates.get(_kind(mode), prior)

    def tokens_per_pass(self, mode: Mode) -> float:
        """Expected tokens of one pass of the target.

        (1 - a^(k+1)) / (1 - a) for k drafts, each accepted with probability a
        (Leviathan, Kalman and Matias, Fast Inference from Transformers via Speculative Decoding, 2023).
        """
        if mode.speculation is None:
            return 1.0
        return _expected(self.rate(mode), mode.speculation.max_draft_tokens)

    def observe(self, mode: Mode, timeline: Timeline) -> None:
        """Learn from the tokens that each chunk after the first brought."""
        passes = len(timeline.tokens) - 1
        if mode.speculation is None or passes < 4:
            return
        drafts = mode.speculation.max_draft_tokens
        per_pass = (timeline.n_tokens - timeline.tokens[0].n_tokens) / passes
        low, high = 0.0, 1.0
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (middle, high) if _expected(middle, drafts) < per_pass else (low, middle)
        self._rates[_kind(mode)] = self.rate(mode) + _RATE * (low - self.rate(mode))


def _expected(rate: float, drafts: int) -> float:
    return drafts + 1.0 if rate > 0.9999 else (1.0 - rate ** (drafts + 1)) / (1.0 - rate)


def _kind(mode: Mode) -> str:
    spec = mode.speculation
    assert spec is not None
    return f"{mode.variant}+{spec.draft_variant or spec.drafter}"
