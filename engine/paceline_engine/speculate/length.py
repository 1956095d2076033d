"""How many drafts pay: as many as bring tokens faster than the step brings them without more.

A stream may draft only as far as the others in its step keep their pace: they wait for its drafts too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

_STRETCH = 2.0
"""How many times as long drafts may make a step that is too long for a stream without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What a stream has to keep while others in its step draft."""

    target_s: float
    """Seconds per token."""
    tokens_per_step: float = 1.0
    """What its steps have given it."""
    drafts: bool = False

    def limit_s(self, plain_s: float) -> float:
        """How long a step may take that takes ``plain_s`` without drafts.

        A stream that is late even so is held up no more than by a fixed factor, and not protected where
        it drafts itself: drafts are then what may bring it back.
        """
        if self.target_s >= plain_s:
            return self.target_s * self.tokens_per_step
        return math.inf if self.drafts else _STRETCH * plain_s


@dataclass(slots=True, kw_only=True)
class Outlook:
    """A step as it is expected: the tokens that it gives, and the seconds that it takes.

    Tokens per second rise with every draft whose own share, probability over cost, is above the step's so
    far, and fall with every other: since each draft is accepted less often than the one before it, the
    first that does not pay ends the row.
    """

    tokens: float
    seconds: float
    plain_s: float = math.inf
    """What the step takes without drafts, where that is known."""

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def pays(self, tokens: float, seconds: float) -> bool:
        return tokens > self.rate * seconds

    def limit_s(self, paces: Iterable[Pace]) -> float:
        """How long drafts may make the step for other streams; infinite where passes are not known."""
        return min((pace.limit_s(self.plain_s) for pace in paces), default=math.inf)

    def add(self, tokens: float, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds

    def after(
        self, probabilities: Iterable[float], seconds_each: float, *, limit_s: float = math.inf
    ) -> tuple[Outlook, int]:
        """The outlook with as many of a row of drafts as pay, and how many these are.

        Args:
            probabilities: of each draft, given that those before it are accepted.
            seconds_each: what one draft adds to the step.
            limit_s: how long the step may take.
        """
        found = replace(self)
        count, reached = 0, 1.0
        for probability in probabilities:
            reached *= probability
            if not found.pays(reached, seconds_each) or found.seconds + seconds_each > limit_s:
                break
            found.add(reached, seconds_each)
            count += 1
        return found, count
