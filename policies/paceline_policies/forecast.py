"""A prediction that can be asked for probabilities, and what it is a prediction of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

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
        ttft = Estimate(
            p50_ms=self.ttft_ms * self.errors.ttft(0.5), p90_ms=self.ttft_ms * self.errors.ttft(0.9)
        )
        if self.tpot_ms is None:
            return Prediction(ttft=ttft, tpot=None, e2e=ttft)
        tpot = Estimate(
            p50_ms=self.tpot_ms * self.errors.tpot(0.5), p90_ms=self.tpot_ms * self.errors.tpot(0.9)
        )
        e2e = Estimate(
            p50_ms=max(ttft.p50_ms, self.e2e_ms * self.errors.e2e(0.5)),
            p90_ms=max(ttft.p90_ms, self.e2e_ms * self.errors.e2e(0.9)),
        )
        return Prediction(ttft=ttft, tpot=tpot, e2e=e2e)

    def p_meet(self, budgets: Budgets) -> float:
        """Probability that every budget is met at once.

        A choice among options has no first token: only its E2E counts.
        """
        ttft = budgets.ttft_ms if self.kind == "chat" else None
        limits = tuple(math.inf if each is None else each for each in (ttft, budgets.tpot_ms, budgets.e2e_ms))
        return self.errors.p_meet(
            points=(self.ttft_ms, self.tpot_ms, self.e2e_ms), limits=(limits[0], limits[1], limits[2])
        )
