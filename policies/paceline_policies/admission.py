"""Who is served next: least slack first, and never work whose deadline has passed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """Work that waits. Times are monotonic seconds."""

    arrival: int
    """Rises with each submission; the last word in any order."""
    needs_s: float
    """Predicted seconds until it would meet its deadline's condition, if it ran now."""
    deadline_at_s: float | None = None
    """None: no deadline, the least urgent."""


def is_expired(work: Pending, *, now_s: float) -> bool:
    """Whether the deadline has passed. Such work is refused, never run and never made urgent."""
    return work.deadline_at_s is not None and work.deadline_at_s <= now_s


def slack_s(work: Pending, *, now_s: float) -> float:
    """Time that it can still wait: deadline - now - what it needs. Negative: predicted to be late."""
    return math.inf if work.deadline_at_s is None else work.deadline_at_s - now_s - work.needs_s


def order_key(work: Pending, *, now_s: float) -> tuple[float, int]:
    """Sort key, smallest first: least slack (Mok, 1983), then arrival."""
    return slack_s(work, now_s=now_s), work.arrival


def admit(work: Iterable[Pending], *, now_s: float) -> tuple[tuple[Pending, ...], tuple[Pending, ...]]:
    """(what may run, most urgent first; what has expired and must be refused, by arrival)."""
    waiting = list(work)
    key: Callable[[Pending], tuple[float, int]] = lambda each: order_key(each, now_s=now_s)  # noqa: E731
    live = sorted((each for each in waiting if not is_expired(each, now_s=now_s)), key=key)
    expired = sorted(
        (each for each in waiting if is_expired(each, now_s=now_s)), key=lambda each: each.arrival
    )
    return tuple(live), tuple(expired)
