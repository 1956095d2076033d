"""Backends in the order of their recent latency, for calls that any of them could take.

A call's latency is normalized, so that a long answer does not count as slow:

    cost = TTFT + TPOT · reference tokens

with TTFT and TPOT as exponentially weighted means of recent calls. A pending call counts as at least
its age, in place of a TTFT it has not shown (so a backend whose calls hang loses traffic before any of
them ends), and the cost is multiplied by 1 + calls in flight, since they share the backend (peak-EWMA,
as in Finagle's load balancer). A backend without a sample and without a call in flight costs nothing:
it is tried first (optimism in the face of uncertainty; Lai and Robbins, 1985).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

_RATE = 0.3
_REFERENCE_TOKENS = 64
_HALF_LIFE_S = 60.0
"""A backend that nobody has called for so long is judged half as harshly: it may have recovered."""


@dataclass(slots=True, kw_only=True)
class LatencyRecord:
    """What was seen of one backend. Times are monotonic seconds, passed in."""

    name: str
    ttft_s: float | None = None
    tpot_s: float | None = None
    last_sample_at_s: float = -math.inf
    _pending: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def in_flight(self) -> int:
        return len(self._pending)

    def started(self, call_id: str, *, now_s: float) -> None:
        """A call was sent."""
        self._pending[call_id] = now_s

    def ended(
        self, call_id: str, *, now_s: float, ttft_s: float | None = None, tpot_s: float | None = None
    ) -> None:
        """A call ended; without a first token, it took at least its age."""
        started_at_s = self._pending.pop(call_id, None)
        if ttft_s is None and started_at_s is not None:
            ttft_s = max(now_s - started_at_s, self.ttft_s or 0.0)
        if ttft_s is not None and math.isfinite(ttft_s):
            self.ttft_s = _mean(self.ttft_s, ttft_s)
            self.last_sample_at_s = now_s
        if tpot_s is not None and math.isfinite(tpot_s):
            self.tpot_s = _mean(self.tpot_s, tpot_s)

    def withdrawn(self, call_id: str) -> None:
        """A call was cancelled by its caller, which says nothing of the backend."""
        self._pending.pop(call_id, None)

    def cost_s(self, *, now_s: float, unknown_s: float = 0.0) -> float:
        """Normalized seconds of a next call; smaller is better.

        ``unknown_s`` stands for a first call that is still under way: one probe at a time is enough.
        """
        oldest = max((now_s - at for at in self._pending.values()), default=0.0)
        if self.ttft_s is None:
            return max(oldest, unknown_s) * (1 + len(self._pending)) if self._pending else 0.0
        tokens_s = (self.tpot_s or 0.0) * _REFERENCE_TOKENS
        known = self.ttft_s + tokens_s
        if not self._pending:
            known *= 0.5 ** (max(0.0, now_s - self.last_sample_at_s) / _HALF_LIFE_S)
        return max(known, oldest) * (1 + len(self._pending))


def rank(records: Sequence[LatencyRecord], *, now_s: float) -> tuple[str, ...]:
    """Names, best first; ties by calls in flight, then by name."""
    known = [record.cost_s(now_s=now_s) for record in records if record.ttft_s is not None]
    typical = median(known) if known else 0.0
    costs = {record.name: record.cost_s(now_s=now_s, unknown_s=typical) for record in records}
    ordered = sorted(records, key=lambda each: (costs[each.name], each.in_flight, each.name))
    return tuple(record.name for record in ordered)


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + _RATE * (new - old)
