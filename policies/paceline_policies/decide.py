"""The choice of a mode: the best quality that fits the budgets, or what the SLO says where none does.

A mode fits where the predicted probability of meeting every budget reaches the SLO's confidence. Among
those that fit, the highest quality is taken, then the cheapest: the least expected engine time (p50 of
E2E) times the bytes of weights that each pass reads. Ties go by backend and mode name, so the same
inputs always give the same decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline_engine.errors import InvalidValueError
from paceline_engine.plan import Plan
from paceline_policies.decision import Candidate, Decision, Remedy
from paceline_policies.forecast import Budgets, Work
from paceline_policies.judge import (
    BackendState,
    Judged,
    Remaining,
    fallback_variants,
    judge,
    judge_mode,
    longest_cap,
)
from paceline_policies.remedy import cheapest_remedy
from paceline_policies.slo import SLO

__all__ = ["BackendState", "Remaining", "decide", "infeasible_message"]


def decide(
    slo: SLO,
    left: Budgets,
    backends: Sequence[BackendState],
    *,
    max_tokens: int,
    now_s: float,
    kind: str = "chat",
    option_tokens: Sequence[int] = (),
    choices: int = 1,
) -> Decision:
    """Choose a backend and mode for one generation.

    Args:
        slo: confidence, what to do where nothing fits, and the budgets as they were set.
        left: what is left of the budgets now (``Remaining``, or anything with its fields).
        backends: the candidates.
        max_tokens: the cap that was asked for.
        now_s: monotonic; the plan's times count from it.
        kind: ``chat`` or ``choose``. A choice decodes nothing: only its E2E counts.
        option_tokens: tokens of each option of a choice.
        choices: answers wanted for the one prompt.

    Raises:
        InvalidValueError: no backend, or none with a mode.
    """
    if kind == "choose":
        max_tokens = 1
    work = Work(
        max_tokens=max_tokens,
        kind=kind,
        option_tokens=tuple(option_tokens),
        choices=choices,
        min_quality=slo.min_quality,
    )
    judged = judge(backends, work, left)
    if not judged:
        raise InvalidValueError(
            "backends",
            observed=[state.name for state in backends],
            limit="at least one backend that offers a mode",
            remedy="give the client a backend, or allow more variants",
        )
    fitting = [each for each in judged if each.p_meet >= slo.confidence]
    if fitting:
        chosen = fitting[0]
        reason = f"taken: best quality that fits, {_likely(chosen)}"
        return _decision(slo, left, judged, chosen, now_s, action="run", reason=reason)
    return _infeasible(slo, left, backends, work, judged, now_s)


def infeasible_message(decision: Decision, slo: SLO) -> str:
    """For people: what was asked, how near the nearest mode comes, and what would help."""
    nearest = min(decision.candidates, key=lambda each: (-each.p_meet, each.prediction.e2e.p50_ms))
    text = (
        f"no mode fits the SLO ({slo}); the nearest is {nearest.mode.label} on {nearest.backend}: "
        f"{nearest.reason}"
    )
    if all(each.quality < slo.min_quality for each in decision.candidates):
        best = max(each.quality for each in decision.candidates)
        return f"{text}; lower min_quality to {best:.3f} or less, or serve a better variant"
    remedy = decision.remedy.change if decision.remedy is not None else "allow more time"
    return f"{text}; {remedy}, or set on_infeasible='degrade' to run it anyway"


def _infeasible(
    slo: SLO,
    left: Budgets,
    backends: Sequence[BackendState],
    work: Work,
    judged: list[Judged],
    now_s: float,
) -> Decision:
    remedy = cheapest_remedy(slo, left, backends, work, judged)
    spent = left.e2e_ms is not None and left.e2e_ms <= 0
    none_allowed = all(each.low_quality for each in judged)
    if slo.on_infeasible == "reject" or (slo.hard and spent) or none_allowed:
        return Decision(
            backend=_most_likely(judged, left).state.name,
            plan=None,
            feasible=False,
            action="reject",
            prediction=None,
            candidates=tuple(
                each.candidate(chosen=False, reason=_misses(each, left, slo)) for each in judged
            ),
            remedy=remedy,
        )
    note = ""
    if slo.on_infeasible == "shorten":
        if (shortened := _shorten(slo, left, judged)) is not None:
            reason = (
                f"taken: fits if shortened from {work.max_tokens} to {shortened.work.max_tokens} tokens, "
                f"{_likely(shortened)}"
            )
            return _decision(
                slo, left, judged, shortened, now_s, action="shorten", reason=reason, remedy=remedy
            )
        note = ", and a shorter answer would not help"
    chosen = _most_likely(judged, left)
    reason = f"taken: the most likely to fit, {_likely(chosen)}{note}: {_misses(chosen, left, slo)}"
    return _decision(slo, left, judged, chosen, now_s, action="degrade", reason=reason, remedy=remedy)


def _most_likely(judged: Sequence[Judged], left: Budgets) -> Judged:
    """The highest p(meet); where those are alike (all about 0), the nearest: the least median overshoot."""

    def key(each: Judged) -> tuple[bool, bool, float, float, float]:
        nearness = each.forecast.overshoot(left), each.forecast.at(0.5).e2e_ms
        return each.low_quality, each.misfit is not None, -round(each.p_meet, 2), *nearness

    return min(judged, key=key)


def _shorten(slo: SLO, left: Budgets, judged: Sequence[Judged]) -> Judged | None:
    """The mode that can give the longest answer in time; equal lengths by quality, then cost."""
    caps = [(longest_cap(each, left, slo.confidence) or 0, each) for each in judged]
    cap, best = max(caps, key=lambda pair: pair[0])
    if cap < 1:
        return None
    work = replace(best.work, max_tokens=cap)
    return judge_mode(best.state, best.mode, work, left)


def _decision(
    slo: SLO,
    left: Budgets,
    judged: Sequence[Judged],
    chosen: Judged,
    now_s: float,
    *,
    action: str,
    reason: str,
    remedy: Remedy | None = None,
) -> Decision:
    def candidate(each: Judged) -> Candidate:
        if each.p_meet < slo.confidence:
            return each.candidate(chosen=False, reason=_misses(each, left, slo))
        return each.candidate(chosen=False, reason=_outdone(each, chosen))

    taken = chosen.candidate(chosen=True, reason=reason)
    return Decision(
        backend=chosen.state.name,
        plan=_plan(slo, left, chosen, now_s),
        feasible=action == "run",
        action=action,
        prediction=taken.prediction,
        candidates=tuple(
            taken if each.state is chosen.state and each.mode == chosen.mode else candidate(each)
            for each in judged
        ),
        remedy=remedy,
    )


def _plan(slo: SLO, left: Budgets, chosen: Judged, now_s: float) -> Plan:
    def due(ms: float | None) -> float | None:
        # What is spent already has no due time: it must not become the most urgent of all.
        return now_s + ms / 1e3 if ms is not None and ms > 0 else None

    deadline_at_s = due(left.e2e_ms)
    if left.e2e_ms is not None and not slo.hard and chosen.forecast.at(0.9).ttft_ms >= left.e2e_ms:
        # A soft budget is an objective. A deadline that passes before the first token would only get
        # the work refused.
        deadline_at_s = None
    return Plan(
        mode=chosen.mode,
        max_tokens=chosen.work.max_tokens,
        deadline_at_s=deadline_at_s,
        hard_deadline=slo.hard and deadline_at_s is not None,
        first_token_by_s=due(left.ttft_ms) if chosen.work.kind == "chat" else due(left.e2e_ms),
        fallback_variants=fallback_variants(chosen) if slo.adapt and chosen.work.kind == "chat" else (),
        tpot_target_s=None if left.tpot_ms is None or left.tpot_ms <= 0 else left.tpot_ms / 1e3,
        stall_limit_s=None if slo.stall_ms is None else slo.stall_ms / 1e3,
    )


def _misses(each: Judged, left: Budgets, slo: SLO) -> str:
    """Which budgets rule the mode out, and by how much."""
    if each.misfit is not None:
        return each.misfit
    at = each.forecast.at(slo.confidence)
    label = f"p{slo.confidence * 100:.4g}"
    budgets = [("TPOT", at.tpot_ms, left.tpot_ms), ("E2E", at.e2e_ms, left.e2e_ms)]
    if each.work.kind == "chat":
        budgets.insert(0, ("TTFT", at.ttft_ms, left.ttft_ms))
    parts: list[str] = []
    for name, took, limit in budgets:
        if limit is None or took is None:
            continue
        if limit <= 0:
            parts.append(f"the {name} budget ran out {_ms(-limit)} ago")
        elif took > limit:
            left_of_it = "" if name == "TPOT" else " left"  # each token has the whole of it
            parts.append(f"{label} {name} {_ms(took)} > {_ms(limit)}{left_of_it}")
    if not parts:
        return f"each budget fits by itself, all together only with p {each.p_meet:.2f} < {slo.confidence:g}"
    return ", ".join(parts)


def _outdone(each: Judged, chosen: Judged) -> str:
    label = chosen.mode.label
    if chosen.state is not each.state:
        label = f"{label} on {chosen.state.name}"
    if chosen.quality > each.quality:
        known = f"{chosen.quality:.3f} > {each.quality:.3f}" if each.quality > 0 else "not measured here"
        return f"fits, but {label} is of better quality ({known})"
    if chosen.cost < each.cost:
        return f"fits, but {label} costs less ({chosen.cost:.3g} < {each.cost:.3g} GB·s)"
    return f"fits, but {label} comes first among equals"


def _likely(each: Judged) -> str:
    return f"p {each.p_meet:.2f}"


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"
