"""The demo on the real model."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.real


def test_the_demo_plays_a_turn_and_prints_one_object(real) -> None:
    """One choice, one tool and one streamed answer, which repeats what the tool found."""
    played = real("demo", "--profile", "assume")
    assert played["tool"] == "get_reservation_details"
    assert "NW 218" in played["tool_result"]
    assert "09:40" in played["answer"]
    assert played["refused"] is None
    assert played["warm_ms"] > 0
    assert played["start_s"]["load"] > 0
    report = played["report"]
    assert [each["kind"] for each in report["generations"]] == ["choose", "chat"]
    assert [each["budget"] for each in report["verdicts"]] == ["ttft", "tpot", "e2e"]
    assert {"tool", "prefill", "decode"} <= {phase["name"] for phase in report["phases"]}
    assert report["generations"][1]["usage"]["cached_tokens"] > 1000


def test_a_turn_that_cannot_be_kept_is_refused(run) -> None:
    """Where the SLO rejects, the demo prints the report and the reason, and no answer."""
    done = run("demo", "--profile", "assume", "--cold", "--slo", "TTFT<1ms", "--on-infeasible", "reject")
    assert done.returncode == 0, done.stderr
    assert "refused: " in done.stdout
    assert "agent:" not in done.stdout
