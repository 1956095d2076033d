"""How well each mode of each backend would serve a request, before one is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline_engine.backends.base import ModelInfo
from paceline_engine.mode import Mode, Variant
from paceline_engine.snapshot import Snapshot
from paceline_policies.decision import Candidate
from paceline_policies.forecast import Budgets, Forecast, Work
from paceline_policies.predictor import Predictor

_UNTOLD_BYTES = 1_000_000_000
"""Stands for the weights of a backend that does not tell their size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """What a turn has left of its budgets now, in ms; None where there is none, 0 or less where spent."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendState:
    """One backend as a decision sees it."""

    name: str
    snapshot: Snapshot
    predictor: Predictor
    info: ModelInfo
    modes: tuple[Mode, ...]
    quality_factor: float = 1.0
    """How good its model is beside those of the other backends, as its owner ranks it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One mode with its forecast."""

    state: BackendState
    mode: Mode
    work: Work
    forecast: Forecast
    quality: float
    p_meet: float
    cost: float
    """Expected engine seconds times the gigabytes of weights that each pass reads."""
    misfit: str | None
    """Why it cannot run at all."""
    low_quality: bool = False
    """The caller does not allow its quality."""

    def candidate(self, *, chosen: bool, reason: str) -> Candidate:
        return Candidate(
            backend=self.state.name,
            mode=self.mode,
            prediction=self.forecast.prediction,
            quality=self.quality,
            p_meet=self.p_meet,
            max_tokens=self.work.max_tokens,
            chosen=chosen,
            reason=reason,
        )


def judge(states: Sequence[BackendState], work: Work, left: Budgets) -> list[Judged]:
    """Every mode, best quality first; equal qualities by cost, then by name."""
    decodes = work.kind == "chat" and work.max_tokens > 1
    judged = [
        judge_mode(state, mode, work, left)
        for state in states
        for mode in state.modes
        if decodes or mode.speculation is None  # where nothing is decoded there is nothing to draft
    ]
    return sorted(judged, key=_preference)


def judge_mode(state: BackendState, mode: Mode, work: Work, left: Budgets) -> Judged:
    forecast = state.predictor.forecast(mode, state.snapshot, work)
    quality = (_quality(state, mode.variant) or 0.0) * state.quality_factor
    low = quality < work.min_quality
    misfit = f"quality {quality:.3f} < {work.min_quality:g} wanted" if low else _misfit(state, work)
    n_bytes = state.info.bytes_per_variant.get(mode.variant, _UNTOLD_BYTES)
    return Judged(
        state=state,
        mode=mode,
        work=work,
        forecast=forecast,
        quality=quality,
        p_meet=0.0 if misfit else forecast.p_meet(left),
        cost=forecast.at(0.5).e2e_ms * n_bytes / 1e12,
        misfit=misfit,
        low_quality=low,
    )


def _preference(each: Judged) -> tuple[float, int, float, str, str]:
    variants = each.state.info.variants
    # Unmeasured qualities count as 0; among them the model's own order decides.
    order = 0 if each.quality or each.mode.variant not in variants else variants.index(each.mode.variant)
    return -each.quality, order, each.cost, each.state.name, each.mode.label


def fallback_variants(each: Judged) -> tuple[Variant, ...]:
    """What a stream in this mode may be moved to while it runs behind: lower variants that are allowed."""
    state, work = each.state, each.work
    served = [mode.variant for mode in state.modes if mode.speculation is None]
    if each.mode.variant not in served:
        return ()
    below = served[served.index(each.mode.variant) + 1 :]
    return tuple(
        variant
        for variant in below
        if (_quality(state, variant) or 0.0) * state.quality_factor >= work.min_quality
    )


def _quality(state: BackendState, variant: Variant) -> float | None:
    """Measured; the model's first variant is the reference and has 1 by definition."""
    found = state.predictor.quality(variant)
    return 1.0 if found is None and state.info.variants[:1] == (variant,) else found


def _misfit(state: BackendState, work: Work) -> str | None:
    snapshot = state.snapshot
    needed = snapshot.prompt_tokens
    needed += sum(work.option_tokens) if work.kind == "choose" else work.max_tokens
    if work.kind == "chat" and needed > state.info.context_tokens:
        return f"needs {needed} tokens of context, the model has {state.info.context_tokens}"
    capacity = snapshot.capacity_tokens
    if capacity is not None and needed > capacity:
        return f"needs {needed} tokens of KV cache, the backend has {capacity}"
    return None


def longest_cap(each: Judged, left: Budgets, confidence: float) -> int | None:
    """The largest token cap with which the mode fits; None where no cap helps.

    No cap helps where TTFT or TPOT is what fails: they do not depend on how long the answer is.
    """
    work = each.work
    most = min(work.max_tokens, each.state.info.context_tokens - each.state.snapshot.prompt_tokens)
    if work.kind != "chat" or most < 1:
        return None
    without_e2e = Remaining(ttft_ms=left.ttft_ms, tpot_ms=left.tpot_ms)

    def fits(cap: int, budgets: Budgets) -> bool:
        return judge_mode(each.state, each.mode, _capped(work, cap), budgets).p_meet >= confidence

    if not fits(min(2, most), without_e2e) or not fits(1, left):
        return None
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle, left) else (low, middle - 1)
    return low


def _capped(work: Work, cap: int) -> Work:
    return replace(work, max_tokens=cap)
