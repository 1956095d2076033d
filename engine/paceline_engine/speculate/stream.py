"""What the drafters know of one stream."""

from __future__ import annotations

from collections.abc import Sequence

from paceline_engine.mode import Drafter as DrafterKind
from paceline_engine.speculate.acceptance import Acceptance
from paceline_engine.speculate.history import TokenHistory
from paceline_engine.speculate.proposal import ANY, Proposal
from paceline_engine.speculate.sessions import Ids

_PRIOR_WEIGHT = 6.0
_MEMORY_STEPS = 32


class DraftStream:
    """One stream's tokens as the drafters see them, and how its drafts have fared."""

    def __init__(self, known: Acceptance, *, earlier: Sequence[Ids] = ()) -> None:
        self.acceptance = Acceptance(known.estimate, prior_weight=_PRIOR_WEIGHT, memory=_MEMORY_STEPS)
        self.history = TokenHistory(earlier)
        self.likely_ids: set[int] = set()
        """Tokens of its prompt and output, which a reduced output matrix must not miss."""
        self._n_seen = 0
        self.self_drafts = True
        """False once drafting with a model has failed."""

    def follow(self, token_ids: Sequence[int]) -> None:
        """Take in what prompt and output have gained."""
        self.likely_ids.update(token_ids[self._n_seen :])
        self._n_seen = len(token_ids)

    def learn(self, proposal: Proposal, n_accepted: int, known: Acceptance) -> None:
        """A proposal was verified: the drafts behind the first wrong one say nothing."""
        for place, evidence in enumerate(proposal.evidence[: n_accepted + 1]):
            for acceptance in (self.acceptance, known):
                acceptance.learn(evidence, place < n_accepted)
                if evidence.drafter is DrafterKind.SELF:
                    acceptance.learn(ANY, place < n_accepted)
