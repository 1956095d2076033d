"""The spans of one turn.

Spans are started with their parent given and never attached across a ``yield``. Phases are recorded
after the fact, from monotonic timestamps that one anchor per turn maps to wall time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from paceline.report import GenerationRecord, Report
from paceline_engine.backends.base import ModelInfo
from paceline_engine.request import GenerationRequest, Message, ScoreRequest
from paceline_policies.decision import Decision
from paceline_policies.slo import SLO


class ToolSpan(Protocol):
    def end(self, *, ended_at_s: float, error: BaseException | None = None) -> None: ...


class ChatSpan(Protocol):
    """``chat {model}``."""

    def decided(self, decision: Decision, *, started_at_s: float, ended_at_s: float) -> None: ...

    def end(
        self, record: GenerationRecord, *, output_text: str | None = None, error: BaseException | None = None
    ) -> None:
        """End it once, with its phases as children; later calls do nothing."""
        ...


class TurnSpan(Protocol):
    """``invoke_agent {name}``."""

    @property
    def trace_id(self) -> str | None:
        """Hex, or None where nothing is recorded."""
        ...

    def start_chat(
        self,
        request: GenerationRequest | ScoreRequest,
        *,
        model: ModelInfo,
        backend: str,
        started_at_s: float,
        messages: tuple[Message, ...],
    ) -> ChatSpan: ...

    def start_tool(
        self, name: str, *, started_at_s: float, attributes: Mapping[str, Any] | None = None
    ) -> ToolSpan: ...

    def end(self, report: Report, *, error: BaseException | None = None) -> None: ...


def start_turn(name: str, *, slo: SLO, started_at_s: float) -> TurnSpan:
    """Start the turn's span as a child of the caller's current span."""
    raise NotImplementedError
