"""``invoke_agent {name}``: one turn, and ``execute_tool {name}`` under it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import metadata
from typing import Any

from opentelemetry import context as context_api
from opentelemetry import metrics
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Tracer, TracerProvider, format_trace_id, set_span_in_context
from opentelemetry.util.types import AttributeValue

from paceline.report import Report
from paceline.tracing import attributes, content, names
from paceline.tracing.chat_span import RecordedChat, Recorder, harmless
from paceline.tracing.clock import Anchor
from paceline.tracing.instruments import instruments
from paceline.tracing.settings import settings_of
from paceline_engine.backends.base import ModelInfo
from paceline_engine.request import GenerationRequest, Message, ScoreRequest
from paceline_policies.slo import SLO

_TURN = context_api.create_key("paceline-turn")


class RecordedTool:
    """Implements ``paceline.tracing.spans.ToolSpan``."""

    def __init__(
        self,
        span: Span,
        *,
        parent: Context,
        recorder: Recorder,
        started_at_s: float,
        on_end: Callable[[RecordedTool], None],
    ) -> None:
        self._span = span
        self._context = set_span_in_context(span, parent)
        self._recorder = recorder
        self._started_at_s = started_at_s
        self._on_end = on_end
        self._lock = threading.Lock()
        self._ended = False

    @property
    def context(self) -> Context:
        """For spans that the tool's body starts; see ``paceline.tracing.context.activate``."""
        return self._context

    def end(self, *, ended_at_s: float, error: BaseException | None = None) -> None:
        """End it once; later calls do nothing."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        ended_at_s = max(ended_at_s, self._started_at_s)
        if error is not None and self._span.is_recording():
            with harmless():
                self._recorder.record_error(self._span, error, at_s=ended_at_s)
        with harmless():
            self._span.end(end_time=self._recorder.anchor.wall(ended_at_s))
        self._on_end(self)

    def abandon(self, *, ended_at_s: float) -> None:
        """End it as cancelled, where the turn ended first."""
        with self._lock:
            if self._ended:
                return
        self._span.set_attribute(names.CANCELLED, True)
        self.end(ended_at_s=ended_at_s)


class RecordedTurn:
    """Implements ``paceline.tracing.spans.TurnSpan``."""

    def __init__(
        self,
        name: str,
        *,
        slo: SLO,
        started_at_s: float,
        provider: TracerProvider,
        parent: Context,
    ) -> None:
        settings = settings_of(provider)
        name = content.label(name)
        self._recorder = Recorder(
            tracer=_tracer(provider),
            instruments=instruments(metrics.get_meter_provider(), settings.conventions),
            settings=settings,
            anchor=Anchor.now(started_at_s=started_at_s),
            slo=slo,
        )
        self._started_at_s = started_at_s
        self._span = self._recorder.tracer.start_span(
            f"{names.INVOKE_AGENT} {name}",
            context=parent,
            start_time=self._recorder.anchor.wall(started_at_s),
            attributes={
                names.OPERATION_NAME: names.INVOKE_AGENT,
                names.PROVIDER_NAME: names.PROVIDER,
                names.AGENT_NAME: name,
            },
        )
        self._trace_id: str | None = None
        if self._span.is_recording():
            self._trace_id = format_trace_id(self._span.get_span_context().trace_id)
            self._span.set_attributes(attributes.of_slo(slo))
        self._mark = object()
        self._context = context_api.set_value(_TURN, self._mark, set_span_in_context(self._span, parent))
        self._lock = threading.Lock()
        self._ended = False
        self._open_chats: dict[str, RecordedChat] = {}
        self._open_tools: set[RecordedTool] = set()

    @property
    def trace_id(self) -> str | None:
        """Hex, or None where nothing is recorded."""
        return self._trace_id

    @property
    def context(self) -> Context:
        """For spans that the turn's body starts; see ``paceline.tracing.context.activate``."""
        return self._context

    def start_chat(
        self,
        request: GenerationRequest | ScoreRequest,
        *,
        model: ModelInfo,
        backend: str,
        started_at_s: float,
        messages: tuple[Message, ...],
    ) -> RecordedChat:
        recorder, parent = self._recorder, self._parent()
        labels: dict[str, AttributeValue] = {
            names.OPERATION_NAME: names.CHAT,
            names.PROVIDER_NAME: names.PROVIDER,
            names.REQUEST_MODEL: model.name,
        }
        span = recorder.tracer.start_span(
            f"{names.CHAT} {model.name}",
            context=parent,
            kind=SpanKind.CLIENT,
            start_time=recorder.anchor.wall(started_at_s),
            attributes={**labels, names.BACKEND: backend},
        )
        if span.is_recording():
            with harmless():
                span.set_attributes(attributes.of_request(request))
                if recorder.settings.record_content:
                    self._record_input(span, request, messages)
        chat = RecordedChat(
            span,
            parent=parent,
            recorder=recorder,
            labels=labels,
            started_at_s=started_at_s,
            on_end=lambda _ended: self._forget_chat(request.id),
        )
        with self._lock:
            self._open_chats[request.id] = chat
        return chat

    def start_tool(
        self,
        name: str,
        *,
        started_at_s: float,
        attributes: Mapping[str, Any] | None = None,
        pinned_tokens: int = 0,
    ) -> RecordedTool:
        recorder, parent, name = self._recorder, self._parent(), content.label(name)
        span = recorder.tracer.start_span(
            f"{names.EXECUTE_TOOL} {name}",
            context=parent,
            start_time=recorder.anchor.wall(started_at_s),
            attributes={names.OPERATION_NAME: names.EXECUTE_TOOL, names.TOOL_NAME: name},
        )
        if pinned_tokens:
            span.set_attribute(names.CACHE_PINNED_TOKENS, pinned_tokens)
        if attributes and span.is_recording():
            settings = recorder.settings
            with harmless():
                found = content.tool_attributes(
                    attributes, record_content=settings.record_content, content_limit=settings.content_limit
                )
                span.set_attributes(found)
        tool = RecordedTool(
            span, parent=parent, recorder=recorder, started_at_s=started_at_s, on_end=self._forget_tool
        )
        with self._lock:
            self._open_tools.add(tool)
        return tool

    def end(self, report: Report, *, error: BaseException | None = None) -> None:
        """End it once, and with it what is still open under it; later calls do nothing."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        ended_at_s = max(report.ended_at_s, self._started_at_s)
        with harmless():
            self._end_children(report, ended_at_s)
        if self._span.is_recording():
            with harmless():
                self._record(report, error, ended_at_s)
        with harmless():
            for verdict in report.verdicts:
                self._recorder.instruments.record_verdict(verdict)
        with harmless():
            self._span.end(end_time=self._recorder.anchor.wall(ended_at_s))

    def _record(self, report: Report, error: BaseException | None, ended_at_s: float) -> None:
        self._span.set_attributes(attributes.of_report(report))
        limit_ms = self._recorder.slo.e2e_ms
        if limit_ms is not None and (deadline_s := self._started_at_s + limit_ms / 1e3) < ended_at_s:
            self._recorder.add_deadline(self._span, "e2e", limit_ms=limit_ms, at_s=deadline_s)
        if error is not None:
            self._recorder.record_error(self._span, error, at_s=ended_at_s)

    def _record_input(
        self, span: Span, request: GenerationRequest | ScoreRequest, messages: tuple[Message, ...]
    ) -> None:
        limit = self._recorder.settings.content_limit
        span.set_attribute(names.INPUT_MESSAGES, content.input_messages(messages, limit))
        if isinstance(request, GenerationRequest) and request.stop:
            span.set_attribute(
                names.REQUEST_STOP_SEQUENCES, [content.shorten(text, limit) for text in request.stop]
            )

    def _end_children(self, report: Report, ended_at_s: float) -> None:
        with self._lock:
            chats, tools = dict(self._open_chats), set(self._open_tools)
        records = {record.id: record for record in report.generations}
        for request_id, chat in chats.items():
            if (record := records.get(request_id)) is not None:
                chat.end(record)
            else:
                chat.abandon(ended_at_s=ended_at_s)
        for tool in tools:
            tool.abandon(ended_at_s=ended_at_s)

    def _parent(self) -> Context:
        """The caller's context where it lies inside this turn (a tool, a framework's span), else the turn's.

        Never the context of whatever thread or task happens to run: the mark tells ours apart.
        """
        current = context_api.get_current()
        return current if context_api.get_value(_TURN, current) is self._mark else self._context

    def _forget_chat(self, request_id: str) -> None:
        with self._lock:
            self._open_chats.pop(request_id, None)

    def _forget_tool(self, tool: RecordedTool) -> None:
        with self._lock:
            self._open_tools.discard(tool)


@lru_cache(maxsize=8)
def _tracer(provider: TracerProvider) -> Tracer:
    """The provider's tracer; asking the SDK for it again takes longer than starting a span."""
    try:
        version = metadata.version("paceline")
    except metadata.PackageNotFoundError:
        # The sources are on the path without having been installed.
        version = None
    return provider.get_tracer(names.INSTRUMENTATION, version)
