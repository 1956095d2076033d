"""What a turn took: budgets, verdicts, phases, decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
    """The phase to blame where it was missed, else None: ``queue``, ``prefill``, ``decode``, ``tool``,
    ``consumer`` (the caller took tokens late) or ``agent`` (the caller's code between calls)."""
    detail: str = ""
    """For people: which generation or tool, and by how much."""

    @property
    def over_ms(self) -> float:
        """How far past the limit; negative where it was met."""
        return self.measured_ms - self.limit_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRecord:
    """One model call of the turn. Times ending in ``_at_s`` are seconds on the client's monotonic clock."""

    id: str
    kind: str
    """``chat`` or ``choose``."""
    decision: Decision = field(repr=False)
    timeline: Timeline = field(repr=False)
    """With delivered times filled in."""
    usage: Usage
    finish_reason: str | None
    """None where it failed."""
    error: str | None = None
    decide_ms: float = 0.0
    """From the call to its dispatch: template, tokens, snapshot and decision."""
    slo: SLO | None = None
    """The call's own, where it had one."""
    predicted_queue_ms: float = 0.0
    """The part of the predicted TTFT that was expected to go by before the first step."""

    @property
    def called_at_s(self) -> float:
        """When the caller asked; what the caller waits for counts from here."""
        return self.timeline.submitted_at_s - self.decide_ms / 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRecord:
    """One run of a tool in the turn."""

    name: str
    started_at_s: float
    ended_at_s: float
    error: str | None = None
    pinned_tokens: int = 0
    """Tokens of the prompt that was to stay cached while it ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One turn, as it went. ``print(report)`` gives the verdicts, the waterfall and the decisions.

    Times ending in ``_at_s`` are seconds on the client's monotonic clock; ``to_dict`` has them from the
    turn's opening.
    """

    name: str
    trace_id: str | None
    """Hex; None where nothing is recorded."""
    slo: SLO
    started_at_s: float
    ended_at_s: float
    generations: tuple[GenerationRecord, ...] = field(repr=False)
    """In the order of their calls."""
    phases: tuple[Phase, ...] = field(repr=False)
    """Of the whole turn, in order of their start: queue, prefill, decode, tool, consumer, agent."""
    verdicts: tuple[Verdict, ...]
    """One for each budget of the SLO that could be measured."""
    tools: tuple[ToolRecord, ...] = ()

    @property
    def met(self) -> bool:
        """Every budget that could be measured was met."""
        return all(verdict.met for verdict in self.verdicts)

    @property
    def e2e_ms(self) -> float:
        """From the turn's opening to its closing."""
        return (self.ended_at_s - self.started_at_s) * 1e3

    def __str__(self) -> str:
        from paceline.rendering import report_text

        return report_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold; times count in milliseconds from the turn's opening."""
        from paceline.rendering import report_to_dict

        return report_to_dict(self)


def build_report(
    *,
    name: str,
    trace_id: str | None,
    slo: SLO,
    started_at_s: float,
    ended_at_s: float,
    generations: tuple[GenerationRecord, ...],
    tools: tuple[ToolRecord, ...] = (),
) -> Report:
    """The report of a turn that held these generations and tools."""
    from paceline.verdicts import judge, turn_phases

    phases = turn_phases(generations, tools, started_at_s=started_at_s, ended_at_s=ended_at_s)
    return Report(
        name=name,
        trace_id=trace_id,
        slo=slo,
        started_at_s=started_at_s,
        ended_at_s=ended_at_s,
        generations=generations,
        phases=phases,
        verdicts=judge(slo, generations, phases, started_at_s=started_at_s, ended_at_s=ended_at_s),
        tools=tools,
    )


def decision_table(decision: Decision) -> str:
    """Every mode's p50 and p90 with its reason, as text of at most 100 columns."""
    from paceline.rendering import decision_text

    return decision_text(decision)


def decision_to_dict(decision: Decision) -> dict[str, Any]:
    """Plain values that JSON can hold."""
    from paceline.rendering import decision_dict

    return decision_dict(decision)
