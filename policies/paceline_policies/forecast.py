"""A prediction that can be asked for probabilities, and what it is a prediction of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from paceline_policies.conformal import Errors
from paceline_policies.decision import Estimate, Prediction


class Budgets(Protocol):
    """What is left of the budgets, in ms; None where there is none."""

    @property
    def ttft_ms(self) -> float | None: ...
    @property
    def tpot_ms(self) -> float | None: ...
    @property
    def e2e_ms(self) -> float | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is asked of a backend, apart from the mode."""

    max_tokens: int = 1
    """Of each choice; ignored where options are scored."""
    kind: str = "chat"
    """``chat``, or ``choose``: options are scored in one prefill and nothing is decoded."""
    option_tokens: tuple[int, ...] = ()
    """Tokens of each option."""
    choices: int = 1
    min_quality: float = 0.0
    """Modes of less are not taken, however fast."""


class Durations(NamedTuple):
    """In milliseconds; ``tpot_ms`` is None where at most one token is made."""

    ttft_ms: float
    tpot_ms: float | None
    e2e_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A prediction that can be asked for probabilities."""

    ttft_ms: float
    tpot_ms: float | None
    e2e_ms: float
    """As the step model gives them, before the errors."""
    errors: Errors
    kind: str = "chat"

    @property
    def prediction(self) -> Prediction:
        middle, late = self.at(0.5), self.at(0.9)
        tpot = None
        if middle.tpot_ms is not None and late.tpot_ms is not None:
            tpot = Estimate(p50_ms=middle.tpot_ms, p90_ms=late.tpot_ms)
        return Prediction(
            ttft=Estimate(p50_ms=middle.ttft_ms, p90_ms=late.ttft_ms),
            tpot=tpot,
            e2e=Estimate(p50_ms=middle.e2e_ms, p90_ms=late.e2e_ms),
        )

    def at(self, q: float) -> Durations:
        """The q-quantile of each duration by itself."""
        ttft = self.ttft_ms * self.errors.ttft(q)
        if self.tpot_ms is None:
            return Durations(ttft_ms=ttft, tpot_ms=None, e2e_ms=ttft)
        e2e = max(ttft, self.e2e_ms * self.errors.e2e(q))
        return Durations(ttft_ms=ttft, tpot_ms=self.tpot_ms * self.errors.tpot(q), e2e_ms=e2e)

    def p_meet(self, budgets: Budgets) -> float:
        """Probability that every budget is met at once.

        A choice among options has no first token: only its E2E counts.
        """
        return self.errors.p_meet(points=self._points, limits=self._limits(budgets))

    def overshoot(self, budgets: Budgets) -> float:
        """By what factor the worst of the budgets is likely (with probability 0.5) to be exceeded.

        Budgets that are spent already are left out, since they are missed by any factor.
        """
        ttft, tpot, e2e = (each if each > 0 else math.inf for each in self._limits(budgets))
        return self.errors.median_overshoot(points=self._points, limits=(ttft, tpot, e2e))

    @property
    def _points(self) -> tuple[float, float | None, float]:
        return self.ttft_ms, self.tpot_ms, self.e2e_ms

    def _limits(self, budgets: Budgets) -> tuple[float, float, float]:
        def limit(budget_ms: float | None) -> float:
            return math.inf if budget_ms is None else budget_ms

        ttft_ms = budgets.ttft_ms if self.kind == "chat" else None
        return limit(ttft_ms), limit(budgets.tpot_ms), limit(budgets.e2e_ms)
