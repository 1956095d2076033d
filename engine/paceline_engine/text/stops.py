"""Stop strings: find them in text that comes in pieces, and send nothing of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """Text that may be sent, and the stop string that ends the output, if one does."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Holds back only what may still become a stop string.

    The match that is complete first wins, and of two that end together the one that began first. So the
    result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> Settled:
        """Take the next piece. After a stop nothing more may be pushed."""
        text = self._held + piece
        if (match := self._first_match(text)) is not None:
            self._held = ""
            start, stop = match
            return Settled(text=text[:start], stop=stop)
        n_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        settled, self._held = text[: len(text) - n_held], text[len(text) - n_held :]
        return Settled(text=settled)

    def flush(self) -> str:
        """The text held back, which at the output's end is no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        found = [(start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(found, key=lambda match: (match[0] + len(match[1]), match[0]), default=None)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of ``stop`` that ends ``text``."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
