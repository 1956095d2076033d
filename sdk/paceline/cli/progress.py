"""Progress of slow starts on standard error, and how long their stages took."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from paceline.progress import STAGES, Bars
from paceline_engine.backends.base import OnProgress, Progress

ONCE = ("fetch", "convert", "calibrate")
"""Kept in the cache folder."""
_LINE_EVERY_S = 10.0


class StageTimes:
    """Passes progress on, and counts the seconds of each stage until it is left.

    The time before a report belongs to the report's stage, and to the stage before it where the report
    says that its own begins.
    """

    def __init__(self, on_progress: OnProgress, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._on_progress = on_progress
        self._clock = clock
        self._at_s = clock()
        self._stage = "load"
        self._seconds: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._count(self._stage)

    def __call__(self, progress: Progress) -> None:
        self._count(self._stage if progress.done <= 0 else progress.stage)
        self._stage = progress.stage
        self._on_progress(progress)

    def _count(self, stage: str) -> None:
        before_s, self._at_s = self._at_s, self._clock()
        self._seconds[stage] = self._seconds.get(stage, 0.0) + self._at_s - before_s

    def to_dict(self) -> dict[str, float]:
        """Seconds of each stage that there was, and of all."""
        return {"total": sum(self._seconds.values()), **self._seconds}

    def __str__(self) -> str:
        total = f"{sum(self._seconds.values()):.1f} s"
        parts = {stage: f"{STAGES.get(stage, stage)} {taken:.1f} s" for stage, taken in self._seconds.items()}
        always = ", ".join(part for stage, part in parts.items() if stage not in ONCE)
        once = ", ".join(part for stage, part in parts.items() if stage in ONCE)
        told = "; ".join(filter(None, (always, f"only this once: {once}" if once else "")))
        return f"{total} ({told})" if len(parts) > 1 else total


@contextmanager
def progress_bar(*, clock: Callable[[], float] = time.monotonic) -> Generator[OnProgress, None, None]:
    """A bar a stage on a terminal; elsewhere a line when a stage begins, at times, and when it ends."""
    if sys.stderr.isatty():
        bars = Bars(transient=False)
        try:
            yield bars
        finally:
            bars.stop()
        return
    begun: set[str] = set()
    ended: set[str] = set()
    told_at_s = 0.0

    def on_progress_line(progress: Progress) -> None:
        nonlocal told_at_s
        name = STAGES.get(progress.stage, progress.stage)
        lines: list[str] = []
        if progress.stage not in begun:
            begun.add(progress.stage)
            lines.append(f"{name} ...")
        if progress.done >= 1 and progress.stage not in ended:
            ended.add(progress.stage)
            lines.append(f"{name}: done")
        if not lines and progress.done < 1 and clock() - told_at_s >= _LINE_EVERY_S:
            lines.append(f"{name}: {progress.done:.0%}")
        for line in lines:
            told_at_s = clock()
            print(line, file=sys.stderr, flush=True)

    yield on_progress_line
