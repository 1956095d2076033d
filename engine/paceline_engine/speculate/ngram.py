"""Drafting without a model: what followed the stream's latest tokens when they came before.

Prompt look-up decoding (Saxena, 2023), over the matches that ``history`` finds.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline_engine.mode import Drafter as DrafterKind
from paceline_engine.speculate.base import DraftRequest
from paceline_engine.speculate.history import MOST_MATCH
from paceline_engine.speculate.proposal import Evidence, Proposal


class NgramDrafter:
    """Implements ``Drafter`` over each stream's own history."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> Proposal:
        history = request.stream.history
        history.follow(request.token_ids)
        length, found, earlier = history.continuation(request.most)
        return Proposal(
            token_ids=tuple(found),
            evidence=tuple(evidence_of(length + place, earlier=earlier) for place in range(len(found))),
        )


def evidence_of(n_matched: int, *, earlier: bool = False) -> Evidence:
    """Each doubling of the match speaks a step louder; a draft's match includes the drafts before it."""
    level = min(n_matched, MOST_MATCH).bit_length()
    return Evidence(drafter=DrafterKind.NGRAM, level=level, earlier=earlier)
