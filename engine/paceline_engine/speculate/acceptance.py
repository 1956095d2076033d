"""How often drafts are right, by what spoke for them."""

from __future__ import annotations

from collections.abc import Callable

from paceline_engine.speculate.proposal import Evidence

Estimate = Callable[[Evidence], float]


class Acceptance:
    """Share of drafts accepted, for each kind of evidence, recent ones counting more.

    The mean of a beta distribution whose prior is ``prior``, worth ``prior_weight`` drafts. Counts fade with
    every ``fade``, also where nothing is drafted: a stream that gave up drafting comes back to its prior, and
    tries again.
    """

    def __init__(self, prior: Estimate, *, prior_weight: float, memory: float) -> None:
        self._prior = prior
        self._prior_weight = prior_weight
        self._keep = 1 - 1 / memory
        """``memory``: after so many calls of ``fade`` a draft counts about a third."""
        self._counts: dict[Evidence, tuple[float, float]] = {}
        """Drafts accepted, drafts tried."""

    def estimate(self, evidence: Evidence) -> float:
        """The probability that a draft is accepted, given that those before it are."""
        accepted, tried = self._counts.get(evidence, (0.0, 0.0))
        weight = self._prior_weight
        return (accepted + weight * self._prior(evidence)) / (tried + weight)

    def learn(self, evidence: Evidence, accepted: bool) -> None:
        hits, tried = self._counts.get(evidence, (0.0, 0.0))
        self._counts[evidence] = (hits + accepted, tried + 1)

    def fade(self) -> None:
        """One step has passed."""
        for evidence, (accepted, tried) in self._counts.items():
            self._counts[evidence] = (accepted * self._keep, tried * self._keep)
