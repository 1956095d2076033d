"""A report as text that fits 100 columns without colour, and as plain values for JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from paceline.report import GenerationRecord, Report, Verdict
from paceline_engine.timeline import VARIANT_CHANGED, Phase, Timeline
from paceline_policies.decision import Candidate, Decision, Estimate, Prediction
from paceline_policies.slo import SLO

WIDTH = 98
_LABEL = 26
_BAR = 56
_MOST_ROWS = 60


def report_text(report: Report) -> str:
    """Verdicts first, then the waterfall, then the decisions."""
    lines = [_headline(report)]
    lines.extend(_verdict_lines(report.verdicts))
    if report.phases:
        lines.append("")
        lines.extend(_waterfall(report))
    for number, record in enumerate(report.generations, start=1):
        lines.append("")
        lines.extend(_generation_lines(number, record))
    return "\n".join(lines)


def decision_text(decision: Decision) -> str:
    return "\n".join(_decision_lines(decision))


def _headline(report: Report) -> str:
    n_calls = len(report.generations)
    others = [each for each in report.generations if each.decision.action != "reject"]
    n_refused, n_failed = n_calls - len(others), sum(each.error is not None for each in others)
    outcomes: list[str] = []
    if missed := [verdict for verdict in report.verdicts if not verdict.met]:
        found = ", ".join(f"{each.budget} by {_ms(each.over_ms)} ({each.blame})" for each in missed)
        outcomes.append(f"MISSED {found}")
    # A turn that did not do all it was asked is no success, however fast.
    outcomes += [
        f"{word} {count} of {n_calls} calls"
        for word, count in (("REFUSED", n_refused), ("FAILED", n_failed))
        if count > 0
    ]
    met = "met every budget" if report.verdicts else "no budget was measured"
    outcome = ", ".join(outcomes) or met
    trace = f"  [trace {report.trace_id}]" if report.trace_id else ""
    return _fit(f"turn '{report.name}': {outcome}", 0) + trace


def _verdict_lines(verdicts: Iterable[Verdict]) -> Iterable[str]:
    for verdict in verdicts:
        state = "met" if verdict.met else f"MISSED by {_ms(verdict.over_ms)}, due to {verdict.blame}"
        head = f"  {verdict.budget:<5}{_ms(verdict.measured_ms):>10} of {_ms(verdict.limit_ms):<9}"
        yield f"{head} {state}"
        if verdict.detail and not verdict.met:
            yield _fit(verdict.detail, 8)


def _waterfall(report: Report) -> Iterable[str]:
    end_s = max(report.ended_at_s, *(phase.ended_at_s for phase in report.phases))
    total_s = max(end_s - report.started_at_s, 1e-9)
    yield f"  {'':<{_LABEL}}|0 ms{_ms(total_s * 1e3):>{_BAR - 4}}|"
    for phase in report.phases[:_MOST_ROWS]:
        left = round((phase.started_at_s - report.started_at_s) / total_s * _BAR)
        left = min(max(left, 0), _BAR - 1)
        width = max(1, round((phase.ended_at_s - phase.started_at_s) / total_s * _BAR))
        bar = (" " * left + "#" * min(width, _BAR - left)).ljust(_BAR)
        yield f"  {_phase_label(phase):<{_LABEL}}|{bar}|{_ms(phase.duration_ms):>9}"
    yield from _marks(report, total_s)
    if len(report.phases) > _MOST_ROWS:
        yield f"  ... and {len(report.phases) - _MOST_ROWS} more phases"


def _marks(report: Report, total_s: float) -> Iterable[str]:
    """A row for each change of variant, with a mark at its moment."""
    moves = [
        (number, event)
        for number, record in enumerate(report.generations, start=1)
        for event in record.timeline.events
        if event.name == VARIANT_CHANGED
    ]
    for number, event in moves[:_MOST_ROWS]:
        at_s = event.at_s - report.started_at_s
        place = min(max(round(at_s / total_s * _BAR), 0), _BAR - 1)
        label = f"{number} {event.attributes.get('from', '?')} > {event.attributes.get('to', '?')}"
        yield f"  {label:<{_LABEL}}|{' ' * place + '^':<{_BAR}}|{_ms(at_s * 1e3):>9}"


def _phase_label(phase: Phase) -> str:
    facts = phase.attributes
    if phase.name == "tool":
        label = f"tool {facts.get('tool', '')}"
    elif "generation" in facts:
        label = f"{facts['generation']} {phase.name}"
        if phase.name == "prefill":
            fresh = int(facts.get("prompt_tokens", 0)) - int(facts.get("cached_tokens", 0))
            label += f" {fresh}+{facts.get('cached_tokens', 0)} cached"
        elif phase.name == "decode":
            label += f" {facts.get('output_tokens', 0)} tokens"
    else:
        label = phase.name
    return label if len(label) <= _LABEL else f"{label[: _LABEL - 3]}..."


def _generation_lines(number: int, record: GenerationRecord) -> Iterable[str]:
    usage = record.usage
    end = record.finish_reason if record.error is None else f"failed, {record.error}"
    yield _fit(
        f"generation {number} ({record.kind}): {usage.prompt_tokens} prompt tokens, "
        f"{usage.cached_tokens} of them cached, {usage.completion_tokens} out, ended: {end}",
        2,
    )
    for event in record.timeline.events:
        if event.name == VARIANT_CHANGED:
            facts = event.attributes
            at_ms = (event.at_s - record.called_at_s) * 1e3
            moved = f"{_ms(at_ms)} after the call: {facts.get('from', '?')} to {facts.get('to', '?')}"
            yield _fit(f"{moved}, {facts.get('why', 'no reason given')}", 4)
    for line in _decision_lines(record.decision):
        yield f"  {line}"


def _decision_lines(decision: Decision) -> Iterable[str]:
    yield f"decision: {decision}"
    if decision.remedy is not None:
        yield _fit(f"would fit: {decision.remedy.change}", 2)
    if decision.candidates:
        times = f"{'ttft p50/p90':>17}{'tpot p50/p90':>18}{'e2e p50/p90':>18}"
        yield f"  {'mode':<15}{'p meet':>7}{'quality':>9}{times}"
    for candidate in decision.candidates:
        yield from _candidate_lines(candidate, several=_backends(decision) > 1)


def _backends(decision: Decision) -> int:
    return len({candidate.backend for candidate in decision.candidates})


def _candidate_lines(candidate: Candidate, *, several: bool) -> Iterable[str]:
    mark = ">" if candidate.chosen else " "
    prediction = candidate.prediction
    yield (
        f"{mark} {candidate.mode.label[:15]:<15}{candidate.p_meet:>7.2f}{candidate.quality:>9.3f}"
        f"{_pair(prediction.ttft):>17}{_pair(prediction.tpot):>18}{_pair(prediction.e2e):>18}"
    )
    where = f"{candidate.backend}: " if several else ""
    yield _fit(f"{where}{candidate.reason}", 6)


def _pair(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    digits = 0 if estimate.p90_ms >= 100 else 1
    return f"{estimate.p50_ms:.{digits}f}/{estimate.p90_ms:.{digits}f} ms"


def _fit(text: str, indent: int) -> str:
    """Wrapped under its own beginning."""
    return textwrap.fill(
        " ".join(text.split()),
        width=WIDTH - 2,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 2),
        break_on_hyphens=False,
    )


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if abs(value) >= 100 else f"{value:.1f} ms"


def report_to_dict(report: Report) -> dict[str, Any]:
    zero = report.started_at_s
    return {
        "name": report.name,
        "trace_id": report.trace_id,
        "slo": slo_dict(report.slo),
        "met": report.met,
        "e2e_ms": report.e2e_ms,
        "verdicts": [
            {
                "budget": verdict.budget,
                "limit_ms": verdict.limit_ms,
                "measured_ms": verdict.measured_ms,
                "over_ms": verdict.over_ms,
                "met": verdict.met,
                "blame": verdict.blame,
                "detail": verdict.detail,
            }
            for verdict in report.verdicts
        ],
        "phases": [_phase_dict(phase, zero) for phase in report.phases],
        "generations": [_record_dict(record, zero) for record in report.generations],
        "tools": [
            {
                "name": tool.name,
                "started_ms": (tool.started_at_s - zero) * 1e3,
                "duration_ms": (tool.ended_at_s - tool.started_at_s) * 1e3,
                "error": tool.error,
                "pinned_tokens": tool.pinned_tokens,
            }
            for tool in report.tools
        ],
    }


def slo_dict(slo: SLO) -> dict[str, Any]:
    return {field.name: getattr(slo, field.name) for field in fields(slo)}


def decision_dict(decision: Decision) -> dict[str, Any]:
    plan, remedy = decision.plan, decision.remedy
    return {
        "action": decision.action,
        "feasible": decision.feasible,
        "backend": decision.backend,
        "mode": None if plan is None else plan.mode.label,
        "max_tokens": None if plan is None else plan.max_tokens,
        "prediction": None if decision.prediction is None else _prediction_dict(decision.prediction),
        "candidates": [
            {
                "backend": candidate.backend,
                "mode": candidate.mode.label,
                "chosen": candidate.chosen,
                "p_meet": candidate.p_meet,
                "quality": candidate.quality,
                "max_tokens": candidate.max_tokens,
                "reason": candidate.reason,
                "prediction": _prediction_dict(candidate.prediction),
            }
            for candidate in decision.candidates
        ],
        "remedy": None
        if remedy is None
        else {"change": remedy.change, "field": remedy.field, "value": remedy.value},
    }


def _prediction_dict(prediction: Prediction) -> dict[str, Any]:
    def of(estimate: Estimate | None) -> dict[str, float] | None:
        return None if estimate is None else {"p50_ms": estimate.p50_ms, "p90_ms": estimate.p90_ms}

    return {"ttft": of(prediction.ttft), "tpot": of(prediction.tpot), "e2e": of(prediction.e2e)}


def _record_dict(record: GenerationRecord, zero: float) -> dict[str, Any]:
    return {
        "id": record.id,
        "kind": record.kind,
        "finish_reason": None if record.finish_reason is None else str(record.finish_reason),
        "error": record.error,
        "usage": {
            "prompt_tokens": record.usage.prompt_tokens,
            "completion_tokens": record.usage.completion_tokens,
            "cached_tokens": record.usage.cached_tokens,
        },
        "called_ms": (record.called_at_s - zero) * 1e3,
        "decide_ms": record.decide_ms,
        "slo": None if record.slo is None else slo_dict(record.slo),
        "ttft_ms": record.timeline.ttft_ms(delivered=True),
        "tpot_ms": record.timeline.tpot_ms(delivered=True),
        "e2e_ms": record.timeline.e2e_ms(delivered=True),
        "timeline": _timeline_dict(record.timeline, zero),
        "decision": decision_dict(record.decision),
    }


def _timeline_dict(timeline: Timeline, zero: float) -> dict[str, Any]:
    def at(seconds: float | None) -> float | None:
        return None if seconds is None else (seconds - zero) * 1e3

    return {
        "mode": timeline.mode.label,
        "submitted_ms": at(timeline.submitted_at_s),
        "queued_ms": at(timeline.queued_at_s),
        "started_ms": at(timeline.started_at_s),
        "finished_ms": at(timeline.finished_at_s),
        "tokens": [
            {
                "n": token.n_tokens,
                "made_ms": at(token.made_at_s),
                "delivered_ms": at(token.delivered_at_s),
            }
            for token in timeline.tokens
        ],
        "events": [
            {"name": event.name, "at_ms": at(event.at_s), "attributes": _plain(event.attributes)}
            for event in timeline.events
        ],
    }


def _phase_dict(phase: Phase, zero: float) -> dict[str, Any]:
    return {
        "name": phase.name,
        "started_ms": (phase.started_at_s - zero) * 1e3,
        "duration_ms": phase.duration_ms,
        "attributes": _plain(phase.attributes),
    }


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON holds, as it is; else its text."""
    return {
        name: value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
        for name, value in values.items()
    }
