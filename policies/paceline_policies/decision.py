"""What a prediction and a decision are made of."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline_engine.mode import Mode
from paceline_engine.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A predicted duration in milliseconds."""

    p50_ms: float
    p90_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What one mode would take in one snapshot, if it ran to the token cap."""

    ttft: Estimate
    tpot: Estimate | None
    """None where nothing is decoded or only one token is asked for."""
    e2e: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One mode that was considered, and why it was taken or not."""

    backend: str
    mode: Mode
    prediction: Prediction
    quality: float
    """Perplexity of the reference variant divided by this variant's, on held text: 1 is the reference."""
    p_meet: float
    """Predicted probability that every budget is met."""
    max_tokens: int
    """The token cap predicted for (``shorten`` may lower it)."""
    chosen: bool
    reason: str
    """For people: which budget rules it out and by how much, or why it was taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """The cheapest change to the request or SLO that would make some mode fit."""

    change: str
    """For people, such as ``raise ttft_ms from 200 to 1240``."""
    field: str
    """``ttft_ms``, ``tpot_ms``, ``e2e_ms``, ``max_tokens`` or ``prompt_tokens``."""
    value: float
    """What the field would have to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The chosen plan, its prediction, and every other mode with its reason."""

    backend: str
    plan: Plan | None
    """None where the SLO rejects."""
    feasible: bool
    """Some mode meets the SLO with the confidence wanted."""
    action: str
    """``run``, ``degrade``, ``shorten`` or ``reject``."""
    prediction: Prediction | None
    candidates: tuple[Candidate, ...] = field(repr=False)
    """Every mode considered, best quality first."""
    remedy: Remedy | None = None
    """Set where nothing fits."""

    def __str__(self) -> str:
        """One line: what is done, and whether it fits. The report prints every mode."""
        if self.plan is None:
            return f"{self.action}: no mode fits the SLO"
        cap = self.plan.max_tokens
        most = f"at most {cap} {'token' if cap == 1 else 'tokens'}"
        why = {
            "degrade": "no mode fits the SLO; this is the nearest",
            "shorten": "fits the SLO with a shorter answer",
        }.get(self.action, "fits the SLO")
        return f"run {self.plan.mode.label} on {self.backend}, {most} ({why})"

    @property
    def chosen(self) -> Candidate | None:
        return next((candidate for candidate in self.candidates if candidate.chosen), None)
