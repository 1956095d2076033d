"""What a turn took: budgets, verdicts, phases, decisions."""

from __future__ import annotations

from dataclasses import dataclass

from paceline_engine.chunk import Usage
from paceline_engine.timeline import Phase, Timeline
from paceline_policies.decision import Decision
from paceline_policies.slo import SLO


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether one budget was met."""

    budget: str
    """``ttft``, ``tpot`` or ``e2e``."""
    limit_ms: float
    measured_ms: float
    met: bool
    blame: str | None
    """Where it was missed: ``queue``, ``prefill``, ``decode``, ``tool``, ``consumer``, ``agent``."""
    detail: str = ""
    """For people: which generation or tool, and by how much."""

    @property
    def over_ms(self) -> float:
        """How far past the limit; negative where it was met."""
        return self.measured_ms - self.limit_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRecord:
    """One model call of the turn."""

    id: str
    kind: str
    """``chat`` or ``choose``."""
    decision: Decision
    timeline: Timeline
    """With delivered times filled in."""
    usage: Usage
    finish_reason: str | None
    """None where it failed."""
    error: str | None = None
    decide_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One turn, as it went. ``print(report)`` gives the waterfall and the verdicts."""

    name: str
    trace_id: str | None
    slo: SLO
    started_at_s: float
    ended_at_s: float
    generations: tuple[GenerationRecord, ...]
    phases: tuple[Phase, ...]
    """Of the whole turn, in order of their start: queue, prefill, decode, tool, consumer."""
    verdicts: tuple[Verdict, ...]
    """One for each budget of the SLO that could be measured."""

    @property
    def met(self) -> bool:
        return all(verdict.met for verdict in self.verdicts)

    @property
    def e2e_ms(self) -> float:
        return (self.ended_at_s - self.started_at_s) * 1e3
