"""The default display of a slow start: a bar on standard error, where that is a terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager

from paceline_engine.backends.base import OnProgress, Progress

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
    bars = _Bars()
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


class _Bars:
    """Appears with the first report, so that a quick start shows nothing."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress as RichProgress

        self._bars = RichProgress(console=Console(stderr=True), transient=True)
        self._stages: dict[str, object] = {}

    def __call__(self, progress: Progress) -> None:
        if not self._stages:
            self._bars.start()
        if progress.stage not in self._stages:
            self._stages[progress.stage] = self._bars.add_task(progress.stage, total=1.0)
        text = f"{progress.stage} {progress.message}".strip()
        self._bars.update(
            self._stages[progress.stage],  # type: ignore[arg-type]  # pyright: ignore
            completed=progress.done,
            description=text,
        )

    def stop(self) -> None:
        if self._stages:
            self._bars.stop()
