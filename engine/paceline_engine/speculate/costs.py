"""What passes cost: seconds as a line over their tokens, fitted as they run."""

from __future__ import annotations

from dataclasses import dataclass

from paceline_engine.mode import Variant
from paceline_engine.timeline import StepTime

_MEMORY = 64
"""Passes after which one counts about a third."""
_PRIOR_SLOPE = 0.08
"""A further token's share of a pass of one, until enough has been seen: decode is bound by memory."""
_PRIOR_DRAFT = 0.4
"""A draft pass's share of the target's, until one has been seen."""
_PRIOR_SPREAD = 4.0
"""Squared tokens of made-up evidence for the prior slope."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassKind:
    variant: Variant
    drafting: bool = False


class _Line:
    """Least squares over faded sums, drawn towards a prior slope while the tokens hardly vary."""

    def __init__(self) -> None:
        self.n = self.x = self.y = self.xx = self.xy = 0.0

    def add(self, x: float, y: float) -> None:
        keep = 1 - 1 / _MEMORY
        self.n, self.x, self.y = self.n * keep + 1, self.x * keep + x, self.y * keep + y
        self.xx, self.xy = self.xx * keep + x * x, self.xy * keep + x * y

    def at(self, x: float) -> float:
        mean_x, mean_y = self.x / self.n, self.y / self.n
        prior = _PRIOR_SLOPE * mean_y / (1 + _PRIOR_SLOPE * (mean_x - 1))
        spread = self.xx - self.n * mean_x**2
        together = self.xy - self.n * mean_x * mean_y
        slope = max(0.0, (together + _PRIOR_SPREAD * prior) / (spread + _PRIOR_SPREAD))
        return max(0.1 * mean_y, mean_y + slope * (x - mean_x))


class PassCosts:
    """Predicts passes from those that ran on this machine. Contexts change slowly and are left out."""

    def __init__(self) -> None:
        self._lines: dict[PassKind, _Line] = {}

    def observe(self, step: StepTime) -> None:
        """Learn from a pass; those with prompt tokens are left out, for they are of another size."""
        if step.prefill_tokens:
            return
        kind = PassKind(variant=step.variant, drafting=step.drafting)
        line = self._lines.setdefault(kind, _Line())
        seconds = step.ended_at_s - step.started_at_s
        if line.n > 1:  # a pass during which the machine stood still says nothing of passes
            seconds = min(seconds, 3 * line.at(step.decode_tokens))
        line.add(step.decode_tokens, seconds)

    def knows(self, variant: Variant) -> bool:
        """Whether predictions for a variant's own passes are seconds of this machine."""
        return PassKind(variant=variant) in self._lines

    def predict(self, kind: PassKind, n_tokens: int, *, target: Variant) -> float:
        """Seconds of a pass; from ``target``'s where none of the kind has run, in passes where none has."""
        if (line := self._lines.get(kind)) is not None:
            return line.at(n_tokens)
        base = PassKind(variant=target)
        if kind == base:
            return 1 + _PRIOR_SLOPE * (n_tokens - 1)
        share = _PRIOR_DRAFT if kind.drafting else 1.0
        return share * self.predict(base, n_tokens, target=target)
