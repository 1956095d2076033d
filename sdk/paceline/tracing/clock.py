"""Monotonic stamps as wall time."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """One reading of both clocks, taken when a turn starts.

    Every timestamp of the turn goes through the same anchor, so that a step of the wall clock in the middle
    of the turn moves nothing: durations are those of the monotonic clock.
    """

    wall_ns: int
    monotonic_s: float

    @classmethod
    def now(cls) -> Anchor:
        return cls(wall_ns=time.time_ns(), monotonic_s=time.monotonic())

    def wall(self, at_s: float) -> int:
        """Nanoseconds since the epoch for a stamp of ``time.monotonic``."""
        return self.wall_ns + round((at_s - self.monotonic_s) * 1e9)
