"""The spans of one turn.

``invoke_agent {name}`` holds ``chat {model}`` (with ``paceline.decide`` and the phases below it) and
``execute_tool {name}``. Spans are started with their parent given and never attached across a ``yield``.
Phases are recorded after the fact, from monotonic timestamps that one anchor per turn maps to wall time.

Every ``end`` may be called from any thread and more than once: the first call counts. Where no tracer
provider is set, or the trace is not sampled, nothing is gathered and hardly any time goes by.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import TracerProvider

from paceline.report import GenerationRecord, Report
from paceline.tracing.turn_span import RecordedTurn
from paceline_engine.backends.base import ModelInfo
from paceline_engine.request import GenerationRequest, Message, ScoreRequest
from paceline_policies.decision import Decision
from paceline_policies.slo import SLO


class ToolSpan(Protocol):
    """``execute_tool {name}``."""

    @property
    def context(self) -> Context:
        """Make it current with ``paceline.tracing.activate`` while the tool runs."""
        ...

    def end(self, *, ended_at_s: float, error: BaseException | None = None) -> None: ...


class ChatSpan(Protocol):
    """``chat {model}``."""

    @property
    def context(self) -> Context:
        """For ``opentelemetry.propagate.inject``, so that a remote call carries ``traceparent``."""
        ...

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

    @property
    def context(self) -> Context:
        """Make it current with ``paceline.tracing.activate`` while the turn's body runs."""
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
        self,
        name: str,
        *,
        started_at_s: float,
        attributes: Mapping[str, Any] | None = None,
        pinned_tokens: int = 0,
    ) -> ToolSpan: ...

    def end(self, report: Report, *, error: BaseException | None = None) -> None: ...


def start_turn(
    name: str,
    *,
    slo: SLO,
    started_at_s: float,
    parent: Context | None = None,
    tracer_provider: TracerProvider | None = None,
) -> TurnSpan:
    """Start the turn's span.

    Args:
        name: the agent's name.
        slo: the budgets of the turn.
        started_at_s: monotonic; the E2E budget counts from here.
        parent: the context of the caller; by default the current one. Give it where the turn is started in
            another thread than the call that asked for it.
        tracer_provider: by default the one that the application has set.
    """
    return RecordedTurn(
        name,
        slo=slo,
        started_at_s=started_at_s,
        provider=trace.get_tracer_provider() if tracer_provider is None else tracer_provider,
        parent=context_api.get_current() if parent is None else parent,
    )
