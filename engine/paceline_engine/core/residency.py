"""Which variants are in memory, and the loading of the others on a thread, beside the steps.

A stream of a variant that is not there waits in the queue, and holds no KV blocks, while others run. A load
that fails ends those that wait for it, and the next request for the variant tries again.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from paceline_engine.errors import BackendError, PacelineError
from paceline_engine.mode import Variant
from paceline_engine.model.base import LateLoading, ModelRunner

_LOG = logging.getLogger(__name__)
_FIRST_BYTES_PER_S = 4e9
"""What a load is expected to read, until one was measured: of files that the system still holds in memory."""
_RETRY_AFTER_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A load that ended, well or not."""

    variant: Variant
    started_at_s: float
    ended_at_s: float
    error: PacelineError | None = None


class Residency:
    """Implements ``schedule.base.Weights``. All methods may be called from any thread.

    One variant loads at a time, those first that a stream waits for.
    """

    def __init__(self, runner: ModelRunner, clock: Callable[[], float]) -> None:
        self._late = runner if isinstance(runner, LateLoading) else None
        self._clock = clock
        self._lock = threading.Lock()
        self._ready = frozenset(runner.variants if self._late is None else self._late.loaded)
        self._queue: list[Variant] = []
        """To be loaded, the first of them now."""
        self._started_at_s = 0.0
        self._ended: list[Loaded] = []
        self._failed_at_s: dict[Variant, float] = {}
        self._bytes_per_s = _FIRST_BYTES_PER_S

    def ready(self, variant: Variant) -> bool:
        """Whether a pass of it may run now."""
        return variant in self._ready

    def want(self, variant: Variant, *, urgent: bool = True) -> None:
        """Load it unless it is there.

        What is ``urgent`` goes before all but the load under way. What is not, and failed, is not tried
        again for half a minute.
        """
        if variant in self._ready:
            return
        with self._lock:
            if variant in self._ready or variant in self._queue[:1]:
                return
            failed_at_s = self._failed_at_s.get(variant, -math.inf)
            if not urgent and self._clock() - failed_at_s < _RETRY_AFTER_S:
                return
            if not self._queue:
                self._queue.append(variant)
                self._started_at_s = self._clock()
                threading.Thread(target=self._load, name="paceline-loading", daemon=True).start()
            elif urgent or variant not in self._queue:
                self._queue = [each for each in self._queue if each != variant]
                self._queue.insert(1 if urgent else len(self._queue), variant)

    def remaining_s(self, variants: Iterable[Variant]) -> dict[Variant, float]:
        """Expected seconds until each of ``variants`` could run, of those that are not there."""
        with self._lock:
            waits: dict[Variant, float] = {}
            before_s = 0.0
            for place, variant in enumerate(self._queue):
                spent_s = self._clock() - self._started_at_s if place == 0 else 0.0
                before_s += max(0.0, self._expected_s(variant) - spent_s)
                waits[variant] = before_s
            first_s = waits[self._queue[0]] if self._queue else 0.0
            return {
                # What is asked for goes before what only may be needed.
                variant: min(waits.get(variant, first_s + expected_s), first_s + expected_s)
                for variant in variants
                if variant not in self._ready
                for expected_s in (0.0 if variant in self._queue[:1] else self._expected_s(variant),)
            }

    def take_ended(self) -> list[Loaded]:
        """The loads that have ended since the last call."""
        if not self._ended:
            return []
        with self._lock:
            found, self._ended = self._ended, []
            return found

    def _expected_s(self, variant: Variant) -> float:
        assert self._late is not None
        return self._late.bytes_per_variant().get(variant, 0) / self._bytes_per_s

    def _load(self) -> None:
        assert self._late is not None
        while True:
            variant, started_at_s = self._queue[0], self._started_at_s
            error: PacelineError | None = None
            try:
                self._late.load_variant(variant)
            except Exception as cause:
                _LOG.exception("%s could not be loaded", variant)
                error = _failure(variant, cause)
            with self._lock:
                ended_at_s = self._clock()
                if error is not None:
                    self._failed_at_s[variant] = ended_at_s
                else:
                    self._ready |= {variant}
                    n_bytes = self._late.bytes_per_variant().get(variant, 0)
                    self._bytes_per_s = max(1.0, n_bytes / max(ended_at_s - started_at_s, 1e-6))
                self._ended.append(
                    Loaded(variant=variant, started_at_s=started_at_s, ended_at_s=ended_at_s, error=error)
                )
                del self._queue[0]
                self._started_at_s = ended_at_s
                if not self._queue:
                    return


def _failure(variant: Variant, cause: Exception) -> PacelineError:
    if isinstance(cause, PacelineError):
        return cause
    error = BackendError(
        f"{variant} could not be loaded: {type(cause).__name__}: {cause}; the next request tries again",
        phase="queue",
    )
    error.__cause__ = cause
    return error
