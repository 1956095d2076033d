"""The default display of a slow start: a bar on standard error, where that is a terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paceline_engine.backends.base import OnProgress, Progress

if TYPE_CHECKING:
    from rich.progress import TaskID

STAGES = {
    "fetch": "fetching the model",
    "load": "loading the model",
    "convert": "converting weights",
    "calibrate": "calibrating",
}
"""What a person reads for each stage of a start."""

_logger = logging.getLogger("paceline")


@contextmanager
def default_progress(on_progress: OnProgress | None) -> Generator[OnProgress]:
    """The caller's display, else a bar for each stage; nothing where nobody watches. Never stdout."""
    if on_progress is not None:
        yield _Guarded(on_progress)
        return
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    bars = Bars(transient=True)
    try:
        yield bars
    finally:
        bars.stop()


class _Guarded:
    """A caller's display, which may fail without failing the start; it is told no more then."""

    def __init__(self, on_progress: OnProgress) -> None:
        self._on_progress: OnProgress | None = on_progress

    def __call__(self, progress: Progress) -> None:
        if self._on_progress is None:
            return
        try:
            self._on_progress(progress)
        except Exception:
            self._on_progress = None
            _logger.exception("on_progress raised, and is told no more of this start")


class Bars:
    """A bar for each stage on standard error; appears with the first report: a quick start shows nothing.

    Args:
        transient: whether it vanishes when it is stopped.
    """

    def __init__(self, *, transient: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        self._bars = RichProgress(
            TextColumn("{task.description:<20}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
            transient=transient,
        )
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, progress: Progress) -> None:
        self._bars.start()
        if progress.stage not in self._tasks:
            name = STAGES.get(progress.stage, progress.stage)
            self._tasks[progress.stage] = self._bars.add_task(name, total=1.0, note="")
        self._bars.update(self._tasks[progress.stage], completed=progress.done, note=progress.message)

    def stop(self) -> None:
        if self._tasks:
            self._bars.stop()
