"""The least quality that a caller allows: at the decision, and for what a stream may be moved to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from paceline_engine.backends.base import ModelInfo
from paceline_engine.errors import InvalidValueError
from paceline_engine.mode import Variant
from paceline_engine.snapshot import Snapshot
from paceline_policies.decide import BackendState, Remaining, decide, infeasible_message
from paceline_policies.decision import Decision
from paceline_policies.modes import candidate_modes
from paceline_policies.predictor import Predictor
from paceline_policies.slo import SLO

FAST = SLO(ttft_ms=None, tpot_ms=1, e2e_ms=None)
"""No mode is that fast: the most likely is int4."""


@pytest.fixture
def choose(
    calibrated: Predictor, info: ModelInfo, snapshot: Callable[..., Snapshot]
) -> Callable[..., Decision]:
    def make(slo: SLO, **fields: object) -> Decision:
        state = BackendState(
            name="b",
            snapshot=snapshot(),
            predictor=calibrated,
            info=info,
            modes=candidate_modes(info),
            **fields,  # type: ignore[arg-type]
        )
        return decide(slo, Remaining(tpot_ms=slo.tpot_ms), [state], max_tokens=50, now_s=0.0)

    return make


def test_by_default_every_variant_may_answer(choose: Callable[..., Decision]) -> None:
    """Without a floor the fastest variant is the most likely where nothing fits."""
    decision = choose(FAST)
    assert decision.plan is not None
    assert decision.plan.mode.variant is Variant.INT4


def test_a_floor_holds_where_nothing_fits(choose: Callable[..., Decision]) -> None:
    """Degrading takes the most likely mode that is good enough, and says why not a faster one."""
    decision = choose(replace(FAST, min_quality=0.95))
    assert decision.plan is not None
    assert decision.plan.mode.variant is Variant.INT8
    reasons = {each.mode.variant: each.reason for each in decision.candidates}
    assert reasons[Variant.INT4] == "quality 0.870 < 0.95 wanted"


def test_a_stream_may_fall_to_what_is_good_enough(choose: Callable[..., Decision]) -> None:
    """The plan names the variants below its own that the floor allows; none where it must not adapt."""
    slow = SLO(ttft_ms=None, tpot_ms=100, e2e_ms=None)

    def fallbacks(slo: SLO) -> tuple[Variant, ...]:
        plan = choose(slo).plan
        assert plan is not None
        assert plan.mode.variant is Variant.BF16
        return plan.fallback_variants

    assert fallbacks(slow) == (Variant.INT8, Variant.INT4)
    assert fallbacks(replace(slow, min_quality=0.9)) == (Variant.INT8,)
    assert fallbacks(replace(slow, min_quality=1.0)) == ()
    assert fallbacks(replace(slow, adapt=False)) == ()


def test_no_variant_good_enough_is_rejected_whatever_the_slo_says(choose: Callable[..., Decision]) -> None:
    """Where the floor excludes every variant nothing runs, and the message names the floor to lower."""
    slo = replace(FAST, min_quality=0.95)
    decision = choose(slo, quality_factor=0.5)
    assert (decision.action, decision.plan) == ("reject", None)
    assert "lower min_quality to 0.500 or less" in infeasible_message(decision, slo)


def test_the_floor_as_text() -> None:
    """The floor and the wish not to adapt are read and written like the other fields."""
    slo = SLO.parse("TPOT<30ms, quality >= 95%, no adapting, else reject")
    assert (slo.min_quality, slo.adapt) == (0.95, False)
    assert SLO.parse(str(slo)) == slo
    for text in ("TPOT<30ms, quality<0.9", "TPOT>30ms", "TPOT<30ms, quality>=1.5", "TPOT<30ms, quality 9ms"):
        with pytest.raises(InvalidValueError):
            SLO.parse(text)


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_a_floor_is_a_share(value: float) -> None:
    """Qualities are between 0 and 1."""
    with pytest.raises(InvalidValueError, match="min_quality"):
        SLO(min_quality=value)
