"""Draft tokens, and what speaks for each."""

from __future__ import annotations

from dataclasses import dataclass

from paceline_engine.mode import Drafter as DrafterKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What speaks for one draft token; drafts of equal evidence are accepted about equally often."""

    drafter: DrafterKind
    level: int
    """How strong it is, in the drafter's own steps."""
    earlier: bool = False
    """It stands in an earlier text of the session, not in the stream's own."""


ANY = Evidence(drafter=DrafterKind.SELF, level=-1)
"""A draft of the model of which nothing is known yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Draft tokens that follow a stream's last token, and what speaks for each."""

    token_ids: tuple[int, ...] = ()
    evidence: tuple[Evidence, ...] = ()
