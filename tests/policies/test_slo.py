from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline_engine.errors import InvalidValueError
from paceline_policies.slo import SLO


@pytest.mark.parametrize(
    "text",
    [
        "TTFT<200ms, TPOT<30ms, E2E<2s",
        "ttft <= 200 ms; itl: 30ms\nlatency = 2 s",
        "time to first token 0.2s and tpot 30000us and end-to-end<2000ms",
        "End_To_End<2s , TPOT ≤ 30 ms per token,TTFT=200ms,",
        "e2e<0.03333333333333333min, ttft 2e2 ms, tpot<30ms/token",
    ],
)
def test_spellings(text: str) -> None:
    """Names in any case and alias, every operator, separator and unit give the same budgets."""
    slo = SLO.parse(text)
    assert (slo.ttft_ms, slo.tpot_ms) == (200.0, 30.0)
    assert slo.e2e_ms == pytest.approx(2000.0)


def test_unnamed_budgets_are_none() -> None:
    """A budget that is not named does not exist, while the guards keep their defaults."""
    slo = SLO.parse("TTFT<1s")
    assert (slo.ttft_ms, slo.tpot_ms, slo.e2e_ms) == (1000.0, None, None)
    assert (slo.stall_ms, slo.confidence, slo.hard) == (SLO().stall_ms, SLO().confidence, False)
    none = SLO.parse("no budgets, no stall")
    assert (none.ttft_ms, none.tpot_ms, none.e2e_ms, none.stall_ms) == (None, None, None, None)


@pytest.mark.parametrize(
    "tail", ["hard, else reject", "hard else reject", "else reject and hard", "HARD or else REJECT"]
)
def test_keywords(tail: str) -> None:
    """What to do and whether the deadline is hard stand after a separator or a blank."""
    slo = SLO.parse(f"E2E<2s, confidence 95%, stall<5s, {tail}")
    assert slo == SLO(
        ttft_ms=None, tpot_ms=None, confidence=0.95, stall_ms=5000.0, hard=True, on_infeasible="reject"
    )
    assert SLO.parse(f"E2E<2s {tail}").hard


@pytest.mark.parametrize(
    "text",
    [
        "",
        " , ;",
        "hard",
        "confidence 90%",
        "fast please",
        "TTFT",
        "TTFT<",
        "<200ms",
        "TTFT>200ms",
        "TTFT200ms",
        "throughput<200ms",
        "TTFT<-200ms",
        "TTFT<0ms",
        "TTFT<nan",
        "TTFT<nanms",
        "TTFT<inf s",
        "TTFT<-inf",
        "TTFT<1e999s",
        "TTFT<1e-999ms",
        "TTFT<200h",
        "TTFT<20%",
        "TTFT<1,000ms",
        "TTFT<200ms per token",
        "TTFT<200ms, time to first token<200ms",
        "E2E<2s, latency<2s",
        "E2E<2s, hard, soft",
        "E2E<2s else reject else degrade",
        "E2E<2s else explode",
        "E2E<2s, no budgets",
        "E2E<2s, confidence 0",
        "E2E<2s, confidence 100%",
        "E2E<2s, confidence 90ms",
        "TTFT<200ms, hard",
        "TTFT<200ms E2E<2s",
    ],
)
def test_nonsense_is_refused(text: str) -> None:
    """What is no budget is refused with the limit, the value seen and a remedy."""
    with pytest.raises(InvalidValueError) as caught:
        SLO.parse(text)
    assert caught.value.limit
    assert caught.value.remedy


@pytest.mark.parametrize("value", [None, 200, b"TTFT<200ms", ["TTFT<200ms"]])
def test_only_text_is_parsed(value: object) -> None:
    """Anything but text is a wrong value, not a crash."""
    with pytest.raises(InvalidValueError):
        SLO.parse(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["TTFT<200", "e2e 2", "TPOT:30, E2E<2s", "stall<5, TTFT<1s"])
def test_missing_unit_is_named(text: str) -> None:
    """A bare number is refused with an error that asks for the unit."""
    with pytest.raises(InvalidValueError, match="unit"):
        SLO.parse(text)


times = st.one_of(st.none(), st.floats(min_value=1e-9, max_value=1e15))


@given(
    ttft=times,
    tpot=times,
    e2e=times,
    stall=times,
    confidence=st.floats(min_value=0, max_value=1, exclude_min=True, exclude_max=True),
    action=st.sampled_from(["degrade", "shorten", "reject"]),
    hard=st.booleans(),
)
def test_text_round_trip(
    ttft: float | None,
    tpot: float | None,
    e2e: float | None,
    stall: float | None,
    confidence: float,
    action: str,
    hard: bool,
) -> None:
    """The text of any SLO reads back as the same SLO."""
    assume(e2e is None or max(ttft or 0, tpot or 0) <= e2e)
    assume(stall is None or max(ttft or 0, tpot or 0) <= stall)
    slo = SLO(
        ttft_ms=ttft,
        tpot_ms=tpot,
        e2e_ms=e2e,
        stall_ms=stall,
        confidence=confidence,
        on_infeasible=action,  # type: ignore[arg-type]
        hard=hard and e2e is not None,
    )
    assert SLO.parse(str(slo)) == slo


@given(st.text(max_size=60))
def test_any_text_parses_or_is_refused(text: str) -> None:
    """No text raises anything but the one error."""
    with contextlib.suppress(InvalidValueError):
        SLO.parse(text)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ttft_ms", "200"),
        ("e2e_ms", True),
        ("confidence", "0.9"),
        ("confidence", None),
        ("hard", "yes"),
        ("tpot_ms", 10**400),
    ],
)
def test_values_of_the_wrong_type_are_refused_by_name(field, value):
    """A text or a truth value in place of a number names the field, not a line of ours."""
    with pytest.raises(InvalidValueError) as refused:
        SLO(**{field: value})
    assert refused.value.field == field


def test_numbers_of_other_types_become_plain_ones():
    """NumPy's scalars are budgets like any other, and are held as Python's own numbers."""
    slo = SLO(ttft_ms=np.float32(150.0), e2e_ms=np.int64(3000), confidence=np.float64(0.5))
    assert slo == SLO(ttft_ms=150.0, e2e_ms=3000, confidence=0.5)
    assert {type(value) for value in (slo.ttft_ms, slo.e2e_ms, slo.confidence)} == {int, float}


@pytest.mark.parametrize(
    ("budgets", "field", "names"),
    [
        ({"ttft_ms": 3000}, "ttft_ms", "e2e_ms"),
        ({"tpot_ms": 3000}, "tpot_ms", "e2e_ms"),
        ({"ttft_ms": 60, "tpot_ms": 70, "e2e_ms": 50}, "ttft_ms", "e2e_ms"),
        ({"ttft_ms": 500, "stall_ms": 400}, "stall_ms", "ttft_ms"),
        ({"ttft_ms": None, "tpot_ms": 50, "stall_ms": 40}, "stall_ms", "tpot_ms"),
    ],
)
def test_budgets_that_contradict_one_another_are_refused(
    budgets: dict[str, float | None], field: str, names: str
) -> None:
    """A part with more time than the turn, or a stall limit before a budget, is named with the other one."""
    with pytest.raises(InvalidValueError, match=names) as caught:
        SLO(**budgets)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_defaults_give_way_to_a_short_turn() -> None:
    """A turn that is shorter than the default budgets lowers them to its own time."""
    assert SLO(e2e_ms=100).ttft_ms == 100
    assert (SLO(e2e_ms=20).ttft_ms, SLO(e2e_ms=20).tpot_ms) == (20, 20)
    assert SLO(e2e_ms=100, ttft_ms=None).ttft_ms is None
    assert SLO(stall_ms=100) == SLO(ttft_ms=200, stall_ms=100)
