"""Monotonic stamps as wall time."""

from __future__ import annotations

import time
from dataclasses import dataclass

_LONGEST_DELAY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """One reading of the clocks, taken when a turn starts.

    Every timestamp of the turn goes through the same anchor, so that a step of the wall clock in the middle
    of the turn moves nothing: durations are those of the monotonic clock.
    """

    wall_ns: int
    monotonic_s: float
    at_s: float
    """The same moment on the clock that stamps the turn."""

    @classmethod
    def now(cls, *, started_at_s: float) -> Anchor:
        """Read the clocks for a turn that started at ``started_at_s`` and now.

        A start that cannot be a recent reading of ``time.monotonic`` comes from a clock of its own, such as
        a test's manual one: its reading then stands for this moment.
        """
        monotonic_s = time.monotonic()
        recent = 0 <= monotonic_s - started_at_s <= _LONGEST_DELAY_S
        return cls(
            wall_ns=time.time_ns(),
            monotonic_s=monotonic_s,
            at_s=monotonic_s if recent else started_at_s,
        )

    def wall(self, at_s: float) -> int:
        """Nanoseconds since the epoch for a stamp of the turn's clock."""
        return self.wall_ns + round((at_s - self.at_s) * 1e9)

    def now_s(self) -> float:
        """This moment on the turn's clock."""
        return self.at_s + time.monotonic() - self.monotonic_s
