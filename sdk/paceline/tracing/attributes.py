"""Requests, decisions and reports as flat attributes.

Jaeger and most other stores search flat scalars only; what is written as JSON is there to be read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from opentelemetry.util.types import AttributeValue

from paceline.report import GenerationRecord, Report, Verdict
from paceline.tracing import names
from paceline_engine.request import GenerationRequest, SamplingParams, ScoreRequest
from paceline_engine.timeline import VARIANT_CHANGED
from paceline_policies.decision import Candidate, Decision, Prediction
from paceline_policies.slo import SLO

Attributes = dict[str, AttributeValue]

_MOST_REJECTED = 32
"""Rejected modes that are told with their reasons."""


def of_slo(slo: SLO) -> Attributes:
    """The budgets of a turn; a budget that is left out has no attribute."""
    found: Attributes = {
        names.SLO_CONFIDENCE: slo.confidence,
        names.SLO_ON_INFEASIBLE: slo.on_infeasible,
        names.SLO_HARD: slo.hard,
        names.SLO_MIN_QUALITY: slo.min_quality,
        names.SLO_ADAPT: slo.adapt,
    }
    for budget, limit_ms in (("ttft", slo.ttft_ms), ("tpot", slo.tpot_ms), ("e2e", slo.e2e_ms)):
        if limit_ms is not None:
            found[names.slo_budget(budget)] = limit_ms
    return found


def of_request(request: GenerationRequest | ScoreRequest) -> Attributes:
    """How the tokens are drawn, apart from the token cap, which is the decision's."""
    if isinstance(request, ScoreRequest):
        return {names.KIND: "choose", names.REQUEST_ID: request.id, names.OPTIONS: len(request.options)}
    found: Attributes = {names.KIND: "chat", names.REQUEST_ID: request.id, **_of_sampling(request.sampling)}
    if request.grammar is not None:
        found[names.GRAMMAR] = str(request.grammar.kind)
    if request.n != 1:
        found[names.REQUEST_CHOICE_COUNT] = request.n
    return found


def of_decision(decision: Decision) -> Attributes:
    """The chosen mode with its prediction, and the other modes with their reasons."""
    prefix = names.DECISION
    found: Attributes = {
        f"{prefix}.backend": decision.backend,
        f"{prefix}.feasible": decision.feasible,
        f"{prefix}.action": decision.action,
    }
    if decision.plan is not None:
        mode = decision.plan.mode
        found |= {
            f"{prefix}.mode": mode.label,
            f"{prefix}.variant": str(mode.variant),
            f"{prefix}.max_tokens": decision.plan.max_tokens,
            f"{prefix}.speculation": mode.speculation is not None,
            names.REQUEST_MAX_TOKENS: decision.plan.max_tokens,
        }
    if decision.prediction is not None:
        found |= _of_prediction(decision.prediction, prefix)
    if (chosen := decision.chosen) is not None:
        found |= {
            f"{prefix}.quality": chosen.quality,
            f"{prefix}.p_meet": chosen.p_meet,
            f"{prefix}.reason": chosen.reason,
        }
    if decision.remedy is not None:
        found |= {
            f"{prefix}.remedy": decision.remedy.change,
            f"{prefix}.remedy.field": decision.remedy.field,
            f"{prefix}.remedy.value": decision.remedy.value,
        }
    rejected = [candidate for candidate in decision.candidates if not candidate.chosen]
    found[f"{prefix}.rejected_count"] = len(rejected)
    if rejected:
        found[f"{prefix}.rejected_modes"] = ",".join(candidate.mode.label for candidate in rejected)
        found[f"{prefix}.rejected"] = _rejected_json(rejected)
    return found


def of_record(record: GenerationRecord) -> Attributes:
    """Usage and how the call ended; what was used is told also where it failed or was cancelled."""
    found: Attributes = {
        names.USAGE_INPUT_TOKENS: record.usage.prompt_tokens,
        names.USAGE_OUTPUT_TOKENS: record.usage.completion_tokens,
        names.USAGE_CACHE_READ_INPUT_TOKENS: record.usage.cached_tokens,
    }
    line = record.timeline
    if moves := sum(event.name == VARIANT_CHANGED for event in line.events):
        found[names.VARIANT_CHANGES] = moves
    if line.drafted_tokens:
        found[names.DRAFTED_TOKENS] = line.drafted_tokens
        found[names.ACCEPTED_TOKENS] = line.accepted_tokens
    if record.finish_reason is not None:
        found[names.RESPONSE_FINISH_REASONS] = [str(record.finish_reason)]
    return found


def of_report(report: Report) -> Attributes:
    """Verdicts as scalars, and where the time of the turn went."""
    found: Attributes = {names.GENERATIONS: len(report.generations)}
    if report.verdicts:
        missed = [verdict for verdict in report.verdicts if not verdict.met]
        found[names.SLO_MET] = not missed
        if missed:
            found[names.SLO_MISSED] = ",".join(verdict.budget for verdict in missed)
            if (blame := _blame(missed)) is not None:
                found[names.SLO_BLAME] = blame
    for verdict in report.verdicts:
        found |= _of_verdict(verdict)
    totals: dict[str, float] = {}
    for phase in report.phases:
        totals[phase.name] = totals.get(phase.name, 0.0) + phase.duration_ms
    return found | {names.phase_total(name): total for name, total in totals.items()}


def _of_sampling(sampling: SamplingParams) -> Attributes:
    found: Attributes = {
        names.REQUEST_TEMPERATURE: sampling.temperature,
        names.REQUEST_TOP_P: sampling.top_p,
        names.REQUEST_PRESENCE_PENALTY: sampling.presence_penalty,
        names.REQUEST_FREQUENCY_PENALTY: sampling.frequency_penalty,
    }
    if sampling.top_k:
        found[names.REQUEST_TOP_K] = sampling.top_k
    if sampling.seed is not None:
        found[names.REQUEST_SEED] = sampling.seed
    return found


def _of_prediction(prediction: Prediction, prefix: str) -> Attributes:
    estimates = {"ttft": prediction.ttft, "tpot": prediction.tpot, "e2e": prediction.e2e}
    return {
        f"{prefix}.{budget}.{quantile}": value
        for budget, estimate in estimates.items()
        if estimate is not None
        for quantile, value in (("p50_ms", estimate.p50_ms), ("p90_ms", estimate.p90_ms))
    }


def _rejected_json(rejected: Sequence[Candidate]) -> str:
    rows = [
        {
            "mode": candidate.mode.label,
            "backend": candidate.backend,
            "why": candidate.reason,
            "p_meet": round(candidate.p_meet, 3),
            "ttft_p90_ms": round(candidate.prediction.ttft.p90_ms, 1),
            "tpot_p90_ms": None
            if candidate.prediction.tpot is None
            else round(candidate.prediction.tpot.p90_ms, 2),
            "e2e_p90_ms": round(candidate.prediction.e2e.p90_ms, 1),
            "quality": round(candidate.quality, 4),
        }
        for candidate in rejected[:_MOST_REJECTED]
    ]
    return json.dumps(rows, ensure_ascii=False)


def _of_verdict(verdict: Verdict) -> Attributes:
    found: Attributes = {
        names.slo_verdict(verdict.budget, "met"): verdict.met,
        names.slo_verdict(verdict.budget, "limit_ms"): verdict.limit_ms,
        names.slo_verdict(verdict.budget, "measured_ms"): verdict.measured_ms,
        names.slo_verdict(verdict.budget, "over_ms"): verdict.over_ms,
    }
    if verdict.blame is not None:
        found[names.slo_verdict(verdict.budget, "blame")] = verdict.blame
    if verdict.detail:
        found[names.slo_verdict(verdict.budget, "detail")] = verdict.detail
    return found


def _blame(missed: Sequence[Verdict]) -> str | None:
    """The phase to blame for the budget that was overrun the most, relative to its limit."""
    blamed = [verdict for verdict in missed if verdict.blame is not None]
    return max(blamed, key=lambda verdict: verdict.measured_ms / verdict.limit_ms).blame if blamed else None
