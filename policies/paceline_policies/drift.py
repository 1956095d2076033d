"""Scales that follow a machine's speed, and the acceptance of drafts."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
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
    """What becomes of drafted tokens, learned per kind of speculation.

    Two numbers: the probability that a drafted token is accepted, and the share of the longest draft
    that a pass got to verify (a model always drafts all of it, a look-up in the text only what it finds).
    Of a kind that was never seen, another kind of the same drafter stands in; before anything is known
    the probability is 0.5 for self-speculation and 0.2 for n-grams. Both are below what agent dialogue
    shows, so that speculation is judged too slow rather than too fast, yet above 0, so that it is tried
    where drafts are cheap.
    """

    __slots__ = ("_rates", "_shares")

    def __init__(self, known: Mapping[str, float], proposed: Mapping[str, float] | None = None) -> None:
        self._rates = dict(known)
        self._shares = dict(proposed or {})

    @property
    def known(self) -> dict[str, float]:
        """The probabilities, by kind."""
        return dict(self._rates)

    @property
    def proposed(self) -> dict[str, float]:
        """The shares, by kind."""
        return dict(self._shares)

    def rate(self, mode: Mode) -> float:
        """Probability that a drafted token is accepted."""
        if mode.speculation is None:
            return 0.0
        prior = 0.5 if mode.speculation.drafter is Drafter.SELF else 0.2
        return _known_of(mode, self._rates, prior)

    def drafts_per_pass(self, mode: Mode) -> float:
        """Expected draft tokens that a pass verifies."""
        if mode.speculation is None:
            return 0.0
        prior = 1.0 if mode.speculation.drafter is Drafter.SELF else 0.5
        return mode.speculation.max_draft_tokens * _known_of(mode, self._shares, prior)

    def tokens_per_pass(self, mode: Mode) -> float:
        """Expected tokens of one pass of the target.

        (1 - a^(k+1)) / (1 - a) for k drafts, each accepted with probability a
        (Leviathan, Kalman and Matias, Fast Inference from Transformers via Speculative Decoding, 2023).
        """
        if mode.speculation is None:
            return 1.0
        return _expected(self.rate(mode), mode.speculation.max_draft_tokens)

    def observe(self, mode: Mode, timeline: Timeline, *, weight: float = _RATE) -> None:
        """Learn from the tokens that each chunk after the first brought, and from what was drafted.

        ``weight`` is that of the new value against the old one.
        """
        passes = len(timeline.tokens) - 1
        if mode.speculation is None or passes < 4:
            return
        kind, drafts = speculation_kind(mode), mode.speculation.max_draft_tokens
        per_pass = (timeline.n_tokens - timeline.tokens[0].n_tokens) / passes
        low, high = 0.0, 1.0
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (middle, high) if _expected(middle, drafts) < per_pass else (low, middle)
        self._rates[kind] = self.rate(mode) + weight * (low - self.rate(mode))
        share = min(1.0, timeline.drafted_tokens / (passes * drafts))
        before = self.drafts_per_pass(mode) / drafts
        # A backend that does not count its drafts says nothing of them.
        if timeline.drafted_tokens or mode.speculation.drafter is Drafter.NGRAM:
            self._shares[kind] = before + weight * (share - before)


def speculation_kind(mode: Mode) -> str:
    """What acceptance is learned by, such as ``bf16+int4``."""
    assert mode.speculation is not None
    return f"{mode.variant}+{_drafter(mode)}"


def _drafter(mode: Mode) -> str:
    assert mode.speculation is not None
    return str(mode.speculation.draft_variant or mode.speculation.drafter)


def _known_of(mode: Mode, values: Mapping[str, float], prior: float) -> float:
    """The mode's own value, else that of another target with the same drafter, else the prior."""
    if (own := values.get(speculation_kind(mode))) is not None:
        return own
    like = [value for kind, value in sorted(values.items()) if kind.endswith(f"+{_drafter(mode)}")]
    return like[0] if like else prior


def _expected(rate: float, drafts: int) -> float:
    return drafts + 1.0 if rate > 0.9999 else (1.0 - rate ** (drafts + 1)) / (1.0 - rate)
