"""What is left of a turn's budgets now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline_policies.slo import SLO

Clock = Callable[[], float]
"""Gives seconds on a monotonic clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Budgets that a generation has left at one moment; None where the SLO has no such budget."""

    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None
    """Negative where the deadline has passed: late work is never made to look merely urgent."""


class Ledger:
    """The budgets of one turn, counted from its opening.

    TTFT and TPOT are counted afresh for each generation; E2E runs from the opening of the turn to its
    closing, with the tools' and the agent's own time.
    """

    __slots__ = ("_clock", "opened_at_s", "slo")

    def __init__(self, slo: SLO, *, opened_at_s: float, clock: Clock) -> None:
        self.slo = slo
        self.opened_at_s = opened_at_s
        self._clock = clock

    @property
    def deadline_at_s(self) -> float | None:
        """When the turn should have ended, on the ledger's clock."""
        return None if self.slo.e2e_ms is None else self.opened_at_s + self.slo.e2e_ms / 1e3

    def elapsed_ms(self) -> float:
        return (self._clock() - self.opened_at_s) * 1e3

    def remaining_ms(self) -> float | None:
        """What is left of the end-to-end budget; negative once it has passed, None without one."""
        deadline = self.deadline_at_s
        return None if deadline is None else (deadline - self._clock()) * 1e3

    def left(self, slo: SLO | None = None, *, called_at_s: float) -> Left:
        """Budgets left to a generation that was asked for at ``called_at_s``.

        ``slo`` is the call's own, where it has one: its E2E counts from the call, and never outlasts the
        turn's.
        """
        now = self._clock()
        mine = slo if slo is not None else self.slo
        deadline = self.deadline_of(slo, called_at_s=called_at_s)
        return Left(
            ttft_ms=None if mine.ttft_ms is None else mine.ttft_ms - (now - called_at_s) * 1e3,
            tpot_ms=mine.tpot_ms,
            e2e_ms=None if deadline is None else (deadline - now) * 1e3,
        )

    def deadline_of(self, slo: SLO | None, *, called_at_s: float) -> float | None:
        """The deadline of a generation: the turn's, or the call's own where that is earlier."""
        ends = [self.deadline_at_s]
        if slo is not None and slo.e2e_ms is not None:
            ends.append(called_at_s + slo.e2e_ms / 1e3)
        return min((end for end in ends if end is not None), default=None)
