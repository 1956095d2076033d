"""The seam between a turn and the policy layer: what is asked, and who decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from paceline.ledger import Left
from paceline_engine.backends.base import Backend, ModelInfo
from paceline_engine.snapshot import Snapshot
from paceline_engine.timeline import Timeline
from paceline_policies.decision import Decision
from paceline_policies.slo import SLO


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A started backend and what it serves."""

    backend: Backend
    info: ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One generation that is to be decided."""

    slo: SLO
    left: Left
    now_s: float
    deadline_at_s: float | None
    max_tokens: int
    """The cap asked for; 0 where options are scored and nothing is decoded."""
    option_tokens: tuple[int, ...] = ()
    """Tokens of each option, where they are scored."""
    n: int = 1
    mix_cache: bool = False
    """The prefix cache may serve what lower variants computed."""


class Policy(Protocol):
    """Decides for one client, and learns from what happened."""

    def decide(self, ask: Ask, snapshots: Mapping[str, Snapshot]) -> Decision:
        """Choose among the backends whose snapshots are given, by name. Runs nothing."""
        ...

    def queue_ms(self, decision: Decision, snapshot: Snapshot) -> float:
        """The part of the predicted TTFT that others in the queue account for."""
        ...

    def observe(self, decision: Decision, snapshot: Snapshot, timeline: Timeline) -> None:
        """Learn from a generation that ended."""
        ...

    def save(self) -> None:
        """Keep what was learned for the next start; a failure does no harm."""
        ...
