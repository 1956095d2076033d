"""The cheapest change that would make some mode fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline_policies.decision import Remedy
from paceline_policies.forecast import Budgets, Work
from paceline_policies.judge import BackendState, Judged, Remaining, judge, longest_cap
from paceline_policies.slo import SLO

_BUDGETS = ("ttft_ms", "tpot_ms", "e2e_ms")


def cheapest_remedy(
    slo: SLO, left: Budgets, states: Sequence[BackendState], work: Work, judged: Sequence[Judged]
) -> Remedy | None:
    """The smallest relative change of one number that makes some mode fit, tried out before it is told.

    Compared are a lower ``max_tokens``, a shorter prompt and each raised budget, by |ln(new / old)|, so
    that halving and doubling count alike. Where no single change is enough, all budgets that are missed
    are raised together, and ``field`` names the one to raise furthest.
    """
    remaining = Remaining(ttft_ms=left.ttft_ms, tpot_ms=left.tpot_ms, e2e_ms=left.e2e_ms)
    found: list[tuple[float, Remedy]] = []
    caps = [longest_cap(each, left, slo.confidence) for each in judged]
    cap = max((cap for cap in caps if cap is not None), default=0)
    if 0 < cap < work.max_tokens:
        found.append(_lowered("max_tokens", work.max_tokens, cap))
    if (prompt := _longest_prompt(slo, remaining, states, work)) is not None:
        found.append(_lowered("prompt_tokens", *prompt))
    found += [
        raised
        for name in _BUDGETS
        if (raised := _raised_budget(slo, remaining, states, work, name)) is not None
    ]
    if found:
        return min(found, key=lambda each: each[0])[1]
    return _all_raised(slo, remaining, states, work, judged)


def _fits(slo: SLO, left: Remaining, states: Sequence[BackendState], work: Work) -> bool:
    return any(each.p_meet >= slo.confidence for each in judge(states, work, left))


def _lowered(field: str, old: int, new: int) -> tuple[float, Remedy]:
    change = f"lower {field} from {old} to {new}"
    return math.log(old / new), Remedy(change=change, field=field, value=new)


def _longest_prompt(
    slo: SLO, left: Remaining, states: Sequence[BackendState], work: Work
) -> tuple[int, int] | None:
    """(prompt tokens now, the most that would fit)."""
    now = max(state.snapshot.prompt_tokens for state in states)

    def fits(n_tokens: int) -> bool:
        shorter = [
            replace(
                state,
                snapshot=replace(state.snapshot, prompt_tokens=min(n_tokens, state.snapshot.prompt_tokens)),
            )
            for state in states
        ]
        return _fits(slo, left, shorter, work)

    if now <= 1 or not fits(1):
        return None
    low, high = 1, now
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return now, low


def _raised_budget(
    slo: SLO, left: Remaining, states: Sequence[BackendState], work: Work, name: str
) -> tuple[float, Remedy] | None:
    limit: float | None = getattr(slo, name)
    now: float | None = getattr(left, name)
    if limit is None or now is None:
        return None
    without = replace(left, **{name: None})
    judged = judge(states, work, without)
    hopeful = [each for each in judged if each.p_meet >= slo.confidence]
    if not hopeful:
        return None

    def fits(value_ms: float) -> bool:
        budgets = replace(left, **{name: value_ms})
        return any(each.forecast.p_meet(budgets) >= slo.confidence for each in hopeful)

    needed = _smallest(fits, above=max(now, 1e-3))
    if needed is None:
        return None
    value = _round_up(limit + needed - now)
    if not _fits(slo, replace(left, **{name: now + value - limit}), states, work):
        return None
    change = f"raise {name} from {_number(limit)} to {_number(value)}"
    return math.log(value / limit), Remedy(change=change, field=name, value=value)


def _all_raised(
    slo: SLO, left: Remaining, states: Sequence[BackendState], work: Work, judged: Sequence[Judged]
) -> Remedy | None:
    """All missed budgets raised by one factor each, for the mode that needs the least."""
    # A third of the tolerated misses for each budget bounds their union (Bonferroni).
    q = 1.0 - (1.0 - slo.confidence) / 3
    best: tuple[float, dict[str, float]] | None = None
    for each in judged:
        at = each.forecast.at(q)
        values: dict[str, float] = {}
        for name, needed in zip(_BUDGETS, (at.ttft_ms, at.tpot_ms, at.e2e_ms), strict=True):
            limit, now = getattr(slo, name), getattr(left, name)
            if limit is not None and now is not None and needed is not None and needed > now:
                values[name] = _round_up(limit + needed - now)
        worst = max((value / getattr(slo, name) for name, value in values.items()), default=math.inf)
        raised = replace(left, **{k: getattr(left, k) + v - getattr(slo, k) for k, v in values.items()})
        if (best is None or worst < best[0]) and _fits(slo, raised, states, work):
            best = worst, values
    if best is None or not best[1]:
        return None
    values = best[1]
    field = max(values, key=lambda name: values[name] / getattr(slo, name))
    parts = [f"{name} from {_number(getattr(slo, name))} to {_number(v)}" for name, v in values.items()]
    return Remedy(change=f"raise {' and '.join(parts)}", field=field, value=values[field])


def _smallest(fits: Callable[[float], bool], *, above: float) -> float | None:
    """The smallest value that fits, within 0.5%; None where not even a day does."""
    low = high = above
    while not fits(high):
        low, high = high, high * 2
        if high > 86_400_000.0:
            return None
    while high > low * 1.005:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _round_up(value: float) -> float:
    """To three digits, upwards."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return round(math.ceil(value / unit - 1e-9) * unit, 9)


def _number(value: float) -> str:
    return f"{value:.6g}"
