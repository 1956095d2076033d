"""Progress of slow starts, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager

from paceline_engine.backends.base import OnProgress, Progress

STAGES = {
    "fetch": "fetching the model",
    "load": "loading the model",
    "convert": "converting weights",
    "calibrate": "calibrating",
}


@contextmanager
def progress_bar() -> Generator[OnProgress, None, None]:
    """A bar a stage on a terminal; elsewhere one line when a stage begins and one when it ends."""
    if sys.stderr.isatty():
        with _bars() as on_progress:
            yield on_progress
        return
    begun: set[str] = set()
    ended: set[str] = set()

    def on_progress_line(progress: Progress) -> None:
        name = STAGES.get(progress.stage, progress.stage)
        if progress.stage not in begun:
            begun.add(progress.stage)
            print(f"{name} ...", file=sys.stderr, flush=True)
        if progress.done >= 1 and progress.stage not in ended:
            ended.add(progress.stage)
            print(f"{name}: done", file=sys.stderr, flush=True)

    yield on_progress_line


@contextmanager
def _bars() -> Generator[OnProgress, None, None]:
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description:<20}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Bars(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def on_progress(progress: Progress) -> None:
            if progress.stage not in tasks:
                name = STAGES.get(progress.stage, progress.stage)
                tasks[progress.stage] = bars.add_task(name, total=1.0, note="")
            bars.update(tasks[progress.stage], completed=progress.done, note=progress.message)

        yield on_progress
