"""How many drafts pay: as many as bring tokens faster than the step brings them without more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Outlook:
    """A step as it is expected: the tokens that it gives, and the seconds that it takes.

    Tokens per second rise with every draft whose own share, probability over cost, is above the step's so
    far, and fall with every other: since each draft is accepted less often than the one before it, the
    first that does not pay ends the row.
    """

    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def pays(self, tokens: float, seconds: float) -> bool:
        return tokens > self.rate * seconds

    def add(self, tokens: float, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds

    def after(self, probabilities: Iterable[float], seconds_each: float) -> tuple[Outlook, int]:
        """The outlook with as many of a row of drafts as pay, and how many these are.

        Args:
            probabilities: of each draft, given that those before it are accepted.
            seconds_each: what one draft adds to the step.
        """
        found = Outlook(tokens=self.tokens, seconds=self.seconds)
        count, reached = 0, 1.0
        for probability in probabilities:
            reached *= probability
            if not found.pays(reached, seconds_each):
                break
            found.add(reached, seconds_each)
            count += 1
        return found, count
