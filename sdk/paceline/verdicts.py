"""Where a turn's time went, which budgets were met, and which phase is to blame for a miss.

Budgets are judged by what the caller saw: TTFT from the call to the delivery of the first chunk, TPOT
between deliveries, E2E from the turn's opening to its closing. TTFT and TPOT hold for each generation; the
verdict is of the one that was furthest over (or least under). A choice among options has no first token.

Blame, in this order:

1. What was made in time but delivered late is blamed on ``consumer``: the agent's own event loop or the
   body of its loop took the chunk late.
2. Where the prediction itself (p50) was over the limit, the largest phase is blamed: nothing was slower
   than it was known to be.
3. Else the phase whose measured time exceeds its predicted time most. Tools, the agent and the consumer
   are predicted to take no time, and neither is the first use of a grammar.

Phases that count: for TTFT ``grammar``, ``queue``, ``prefill`` and ``consumer``; for TPOT ``decode`` and
``consumer``; for E2E all, with ``tool`` and ``agent`` (the time between calls).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.report import GenerationRecord, ToolRecord, Verdict
from paceline_engine.timeline import Phase
from paceline_policies.slo import SLO

SHORTEST_SHOWN_S = 1e-3
"""Gaps below this are no phase of their own."""


def turn_phases(
    generations: Sequence[GenerationRecord],
    tools: Sequence[ToolRecord],
    *,
    started_at_s: float,
    ended_at_s: float,
) -> tuple[Phase, ...]:
    """All phases of a turn in order of their start; what no phase covers is the agent's own time."""
    found: list[Phase] = []
    for number, record in enumerate(generations, start=1):
        found.extend(_of_generation(number, record))
    for tool in tools:
        attributes: dict[str, object] = {"tool": tool.name}
        if tool.error is not None:
            attributes["error"] = tool.error
        found.append(
            Phase(
                name="tool",
                started_at_s=tool.started_at_s,
                ended_at_s=tool.ended_at_s,
                attributes=attributes,
            )
        )
    found = [phase for phase in found if phase.started_at_s <= ended_at_s]
    found.extend(_gaps(found, started_at_s, ended_at_s))
    return tuple(sorted(found, key=lambda phase: (phase.started_at_s, phase.ended_at_s)))


def _of_generation(number: int, record: GenerationRecord) -> Iterable[Phase]:
    """The first counts from the call; ``consumer`` is the lag of the last delivery behind its making."""
    label = {"generation": number, "kind": record.kind}
    for place, phase in enumerate(record.timeline.phases()):
        attributes = {**label, **phase.attributes}
        if place == 0:
            attributes["decide_ms"] = record.decide_ms
            phase = replace(phase, started_at_s=record.called_at_s)
        yield replace(phase, attributes=attributes)
    lag = _last_lag(record)
    if lag is not None and lag[1] - lag[0] >= SHORTEST_SHOWN_S:
        yield Phase(name="consumer", started_at_s=lag[0], ended_at_s=lag[1], attributes=dict(label))


def _last_lag(record: GenerationRecord) -> tuple[float, float] | None:
    """(made, delivered) of what was taken last, where it ended by itself."""
    tokens, finished = record.timeline.tokens, record.timeline.finished_at_s
    if not tokens or finished is None or tokens[-1].delivered_at_s is None:
        return None
    made = max(finished, tokens[-1].made_at_s)
    return (made, tokens[-1].delivered_at_s) if tokens[-1].delivered_at_s > made else None


def _gaps(phases: Sequence[Phase], started_at_s: float, ended_at_s: float) -> list[Phase]:
    gaps: list[Phase] = []
    covered_to = started_at_s
    for phase in sorted(phases, key=lambda phase: phase.started_at_s):
        if phase.started_at_s - covered_to >= SHORTEST_SHOWN_S:
            gaps.append(Phase(name="agent", started_at_s=covered_to, ended_at_s=phase.started_at_s))
        covered_to = max(covered_to, phase.ended_at_s)
    if ended_at_s - covered_to >= SHORTEST_SHOWN_S:
        gaps.append(Phase(name="agent", started_at_s=covered_to, ended_at_s=ended_at_s))
    return gaps


def judge(
    slo: SLO,
    generations: Sequence[GenerationRecord],
    phases: Sequence[Phase],
    *,
    started_at_s: float,
    ended_at_s: float,
) -> tuple[Verdict, ...]:
    """One verdict for each budget that could be measured."""
    verdicts: list[Verdict] = []
    for verdict_of in (_ttft, _tpot):
        found = [
            verdict
            for number, record in enumerate(generations, start=1)
            if (verdict := verdict_of(number, record, record.slo or slo)) is not None
        ]
        if found:
            verdicts.append(max(found, key=lambda verdict: verdict.over_ms))
    if slo.e2e_ms is not None:
        verdicts.append(_e2e(slo.e2e_ms, generations, phases, started_at_s, ended_at_s))
    return tuple(verdicts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """One phase's part in a budget."""

    measured_ms: float
    predicted_ms: float = 0.0

    @property
    def excess_ms(self) -> float:
        return self.measured_ms - self.predicted_ms


def _ttft(number: int, record: GenerationRecord, slo: SLO) -> Verdict | None:
    limit, line = slo.ttft_ms, record.timeline
    if limit is None or record.kind != "chat":
        return None
    where = f"generation {number}"
    if not line.tokens:
        # Nothing came: known only as a miss, once the wait was longer than the limit.
        waited = None if line.finished_at_s is None else (line.finished_at_s - record.called_at_s) * 1e3
        if waited is None or waited <= limit:
            return None
        shares = _first_token_shares(record, made_at_s=line.finished_at_s, delivered_at_s=None)
        return _missed("ttft", limit, waited, shares, f"{where}: no token came in {_ms(waited)}", record)
    first = line.tokens[0]
    delivered_at_s = first.delivered_at_s if first.delivered_at_s is not None else first.made_at_s
    measured = (delivered_at_s - record.called_at_s) * 1e3
    if measured <= limit:
        return _met("ttft", limit, measured, where)
    shares = _first_token_shares(record, made_at_s=first.made_at_s, delivered_at_s=delivered_at_s)
    made_in_time = (first.made_at_s - record.called_at_s) * 1e3 <= limit
    prediction = record.decision.prediction
    return _missed(
        "ttft",
        limit,
        measured,
        shares,
        where,
        record,
        consumer=made_in_time,
        known_over=prediction is not None and prediction.ttft.p50_ms > limit,
    )


def _first_token_shares(
    record: GenerationRecord, *, made_at_s: float | None, delivered_at_s: float | None
) -> dict[str, _Share]:
    line, prediction = record.timeline, record.decision.prediction
    made = made_at_s if made_at_s is not None else record.called_at_s
    started = line.started_at_s if line.started_at_s is not None else made
    queue = record.predicted_queue_ms
    prefill = 0.0 if prediction is None else max(0.0, prediction.ttft.p50_ms - queue)
    late = 0.0 if delivered_at_s is None else (delivered_at_s - made) * 1e3
    waited = (started - record.called_at_s) * 1e3 - line.grammar_ms
    return {
        "grammar": _Share(measured_ms=line.grammar_ms),
        "queue": _Share(measured_ms=waited, predicted_ms=queue),
        "prefill": _Share(measured_ms=(made - started) * 1e3, predicted_ms=prefill),
        "consumer": _Share(measured_ms=late),
    }


def _tpot(number: int, record: GenerationRecord, slo: SLO) -> Verdict | None:
    limit, line = slo.tpot_ms, record.timeline
    made = line.tpot_ms()
    if limit is None or made is None:
        return None
    measured = line.tpot_ms(delivered=True)
    measured = made if measured is None else measured
    where = f"generation {number}"
    if measured <= limit:
        return _met("tpot", limit, measured, where)
    prediction = record.decision.prediction
    predicted = 0.0 if prediction is None or prediction.tpot is None else prediction.tpot.p50_ms
    shares = {
        "decode": _Share(measured_ms=made, predicted_ms=predicted),
        "consumer": _Share(measured_ms=max(0.0, measured - made)),
    }
    return _missed(
        "tpot",
        limit,
        measured,
        shares,
        where,
        record,
        consumer=made <= limit,
        known_over=predicted > limit,
        unit=" per token",
    )


def _e2e(
    limit: float,
    generations: Sequence[GenerationRecord],
    phases: Sequence[Phase],
    started_at_s: float,
    ended_at_s: float,
) -> Verdict:
    measured = (ended_at_s - started_at_s) * 1e3
    if measured <= limit:
        return _met("e2e", limit, measured, "the turn")
    shares = _turn_shares(generations, phases)
    deadline_at_s = started_at_s + limit / 1e3
    lags = [lag for record in generations if (lag := _last_lag(record)) is not None]
    consumer = "consumer" in shares and measured - shares["consumer"].measured_ms <= limit
    return _missed(
        "e2e",
        limit,
        measured,
        shares,
        _largest_tool(phases),
        None,
        consumer=consumer and any(made <= deadline_at_s < delivered for made, delivered in lags),
        known_over=any(
            (record.called_at_s - started_at_s) * 1e3 + _expected_ms(record) > limit for record in generations
        ),
    )


def _turn_shares(generations: Sequence[GenerationRecord], phases: Sequence[Phase]) -> dict[str, _Share]:
    measured: dict[str, float] = {}
    for phase in phases:
        measured[phase.name] = measured.get(phase.name, 0.0) + phase.duration_ms
    predicted: dict[str, float] = {}
    for record in generations:
        if (prediction := record.decision.prediction) is None:
            continue
        queue = record.predicted_queue_ms
        parts = {
            "queue": queue,
            "prefill": max(0.0, prediction.ttft.p50_ms - queue),
            "decode": max(0.0, _expected_ms(record) - prediction.ttft.p50_ms),
        }
        for name, value in parts.items():
            predicted[name] = predicted.get(name, 0.0) + value
    return {
        name: _Share(measured_ms=value, predicted_ms=predicted.get(name, 0.0))
        for name, value in measured.items()
    }


def _expected_ms(record: GenerationRecord) -> float:
    """The predicted E2E: to the cap where it was reached or cut short, else for the tokens that came."""
    prediction = record.decision.prediction
    if prediction is None:
        return 0.0
    if prediction.tpot is None or record.finish_reason in ("length", "budget"):
        return prediction.e2e.p50_ms
    return prediction.ttft.p50_ms + prediction.tpot.p50_ms * max(0, record.timeline.n_tokens - 1)


def _largest_tool(phases: Sequence[Phase]) -> str:
    tools = [phase for phase in phases if phase.name == "tool"]
    if not tools:
        return "the turn"
    longest = max(tools, key=lambda phase: phase.duration_ms)
    return f"the turn (longest tool: {longest.attributes['tool']}, {_ms(longest.duration_ms)})"


def _met(budget: str, limit_ms: float, measured_ms: float, where: str) -> Verdict:
    return Verdict(
        budget=budget,
        limit_ms=limit_ms,
        measured_ms=measured_ms,
        met=True,
        blame=None,
        detail=f"{where}: {_ms(limit_ms - measured_ms)} to spare",
    )


def _missed(
    budget: str,
    limit_ms: float,
    measured_ms: float,
    shares: Mapping[str, _Share],
    where: str,
    record: GenerationRecord | None,
    *,
    consumer: bool = False,
    known_over: bool = False,
    unit: str = "",
) -> Verdict:
    if consumer:
        blame = "consumer"
    elif known_over:
        blame = max(shares, key=lambda name: shares[name].measured_ms)
    else:
        blame = max(shares, key=lambda name: shares[name].excess_ms, default="agent")
    share = shares.get(blame, _Share(measured_ms=measured_ms))
    took = f"{blame} took {_ms(share.measured_ms)}{unit}"
    if blame in ("queue", "prefill", "decode"):
        took += f", predicted {_ms(share.predicted_ms)}"
    if known_over and not consumer:
        took += "; the prediction was over the limit before it ran"
    if record is not None and record.error is not None:
        took += f"; it failed: {record.error}"
    return Verdict(
        budget=budget,
        limit_ms=limit_ms,
        measured_ms=measured_ms,
        met=False,
        blame=blame,
        detail=f"{where}: {took}",
    )


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"
