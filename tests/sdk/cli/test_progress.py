"""What a slow start shows, and how long its stages took."""

from __future__ import annotations

import pytest

from paceline.cli.progress import StageTimes, progress_bar
from paceline.testing import ManualClock
from paceline_engine.backends.base import Progress


def played(*reports: tuple[float, str, float]) -> tuple[StageTimes, list[Progress]]:
    """Reports at their seconds, and a last second to the end."""
    clock, seen = ManualClock(), list[Progress]()
    began = clock()
    with StageTimes(seen.append, clock=clock) as times:
        for at_s, stage, done in reports:
            clock.advance(began + at_s - clock())
            times(Progress(stage=stage, done=done))
        clock.advance(1.0)
    return times, seen


def test_stages_share_the_time_among_them() -> None:
    """Loading around a conversion counts without it, and the rest belongs to the last stage."""
    times, seen = played(
        (2, "load", 0.0), (3, "load", 0.1), (7, "convert", 0.5), (11, "convert", 1.0), (12, "load", 1.0),
        (13, "calibrate", 0.0), (20, "calibrate", 1.0),
    )  # fmt: skip
    assert times.to_dict() == pytest.approx({"total": 21, "load": 5, "convert": 8, "calibrate": 8})
    assert len(seen) == 7
    assert str(times) == (
        "21.0 s (loading the model 5.0 s; only this once: converting weights 8.0 s, calibrating 8.0 s)"
    )


def test_a_cached_start_names_no_other_stage() -> None:
    """Where nothing was converted or calibrated, only the seconds are told."""
    times, _ = played((1, "load", 0.0), (2, "load", 1.0))
    assert str(times) == "3.0 s"
    assert set(times.to_dict()) == {"total", "load"}


def test_lines_elsewhere_than_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A log gets one line where a stage begins and one where it ends, on standard error alone."""
    with progress_bar() as on_progress:
        for done in (0.0, 0.5, 1.0, 1.0):
            on_progress(Progress(stage="calibrate", done=done))
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == ["calibrating ...", "calibrating: done"]


def test_a_long_stage_tells_its_share_at_times(capsys: pytest.CaptureFixture[str]) -> None:
    """A log shows that a slow conversion goes on, some lines a minute."""
    now_s = 100.0
    with progress_bar(clock=lambda: now_s) as on_progress:
        for percent in range(0, 101, 5):
            on_progress(Progress(stage="convert", done=percent / 100))
            now_s += 3.0
    shares = ["20%", "40%", "60%", "80%"]
    assert capsys.readouterr().err.splitlines() == [
        "converting weights ...",
        *(f"converting weights: {share}" for share in shares),
        "converting weights: done",
    ]
