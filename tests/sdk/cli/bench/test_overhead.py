"""The benchmark of what Paceline itself takes."""

from __future__ import annotations

import threading

import pytest

from paceline.cli.bench.busy import busy_process, busy_thread

FIGURES = {
    "turn_overhead",
    "turn_overhead_with_metrics",
    "turn_overhead_untraced",
    "template_and_tokens",
    "tpot_quiet",
    "tpot_busy_thread",
    "tpot_busy_process",
    "busy_ratio",
    "first_decision",
    "torch_import",
    "help",
}


@pytest.mark.real
def test_quick_measures_everything_and_states_no_goal(real, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every figure has its minimum, median and maximum, in one object."""
    report = real("bench", "overhead", "--quick")
    assert report["name"] == "overhead"
    assert report["goals"] == []
    assert set(report["results"]) >= FIGURES
    for name in FIGURES:
        row = report["results"][name]
        assert row["minimum"] <= row["median"] <= row["maximum"], name
    assert report["results"]["help"]["minimum"] > 0
    assert 0 < report["results"]["overhead_share_of_tpot"]["value"] < 1


def test_a_busy_thread_ends_with_its_block() -> None:
    """The loop runs inside the block alone."""
    with busy_thread():
        assert any(each.name == "busy-agent" for each in threading.enumerate())
    assert not any(each.name == "busy-agent" for each in threading.enumerate())


def test_a_busy_process_ends_with_its_block() -> None:
    """The process runs inside the block, and is reaped at its end."""
    with busy_process() as process:
        assert process.poll() is None
    assert process.returncode is not None
