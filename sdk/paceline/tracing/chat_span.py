"""``chat {model}``: one model call, with its phases as children."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.util.types import AttributeValue

from paceline.report import GenerationRecord
from paceline.tracing import attributes, content, names
from paceline.tracing.clock import Anchor
from paceline.tracing.instruments import Instruments, taken_at
from paceline.tracing.settings import Settings
from paceline_engine.chunk import FinishReason
from paceline_engine.timeline import Timeline, TimelineEvent
from paceline_policies.decision import Decision
from paceline_policies.slo import SLO

_logger = logging.getLogger("paceline.tracing")


@contextmanager
def harmless() -> Generator[None]:
    """Keep an error of the recording (a broken processor, an object without a text) out of the turn."""
    try:
        yield
    except Exception:
        _logger.warning("a span could not be recorded in full; the turn is not affected", exc_info=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorder:
    """What the spans of one turn share."""

    tracer: Tracer
    instruments: Instruments
    settings: Settings
    anchor: Anchor
    slo: SLO

    def record_error(self, span: Span, error: BaseException, *, at_s: float) -> None:
        """Mark the span as failed, or as cancelled where the caller left."""
        if is_cancellation(error):
            span.set_attribute(names.CANCELLED, True)
            return
        content.record_error(
            span,
            error,
            at_ns=self.anchor.wall(at_s),
            record_content=self.settings.record_content,
            content_limit=self.settings.content_limit,
        )

    def add_deadline(self, span: Span, budget: str, *, limit_ms: float, at_s: float) -> None:
        """A budget's deadline that passed unmet, at that very moment."""
        span.add_event(
            names.DEADLINE_EVENT,
            {names.BUDGET: budget, names.LIMIT_MS: limit_ms},
            timestamp=self.anchor.wall(at_s),
        )


@dataclass(frozen=True, slots=True)
class _PhaseSpan:
    """A child span of a phase that is still open to events."""

    span: Span
    started_at_s: float
    ended_at_s: float

    def covers(self, at_s: float) -> bool:
        return self.started_at_s <= at_s <= self.ended_at_s


class RecordedChat:
    """Implements ``paceline.tracing.spans.ChatSpan``."""

    def __init__(
        self,
        span: Span,
        *,
        parent: Context,
        recorder: Recorder,
        labels: dict[str, AttributeValue],
        started_at_s: float,
        on_end: Callable[[RecordedChat], None],
    ) -> None:
        self._span = span
        self._context = set_span_in_context(span, parent)
        self._recorder = recorder
        self._labels = labels
        self._started_at_s = started_at_s
        self._on_end = on_end
        self._lock = threading.Lock()
        self._ended = False

    @property
    def context(self) -> Context:
        """For children, and for ``traceparent`` of a remote call."""
        return self._context

    def decided(self, decision: Decision, *, started_at_s: float, ended_at_s: float) -> None:
        """Record the decision, with ``paceline.decide`` as a child."""
        if not self._span.is_recording():
            return
        with harmless():
            self._span.set_attributes(attributes.of_decision(decision))
            wall = self._recorder.anchor.wall
            # The decision itself stands on the call's span, where it is searched for.
            decide = self._recorder.tracer.start_span(
                names.DECIDE_SPAN,
                context=self._context,
                start_time=wall(started_at_s),
                attributes={
                    f"{names.DECISION}.action": decision.action,
                    f"{names.DECISION}.modes": len(decision.candidates),
                },
            )
            decide.end(end_time=wall(max(started_at_s, ended_at_s)))

    def end(
        self, record: GenerationRecord, *, output_text: str | None = None, error: BaseException | None = None
    ) -> None:
        """End it once, with its phases as children; later calls do nothing."""
        if not self._begin_end():
            return
        timeline = record.timeline
        ended_at_s = _end_of(timeline, now_s=self._recorder.anchor.now_s)
        if self._span.is_recording():
            with harmless():
                self._record(record, _closed(timeline, ended_at_s), output_text, error, ended_at_s)
        with harmless():
            self._measure(record, error, ended_at_s)
        self._finish(ended_at_s)

    def abandon(self, *, ended_at_s: float) -> None:
        """End it as cancelled, where nobody told how it went."""
        if self._begin_end():
            self._span.set_attribute(names.CANCELLED, True)
            self._finish(ended_at_s)

    def _begin_end(self) -> bool:
        """True for the first of all callers, whatever their threads."""
        with self._lock:
            first, self._ended = not self._ended, True
        return first

    def _finish(self, ended_at_s: float) -> None:
        with harmless():
            self._span.end(end_time=self._recorder.anchor.wall(max(ended_at_s, self._started_at_s)))
        self._on_end(self)

    def _record(
        self,
        record: GenerationRecord,
        timeline: Timeline,
        output_text: str | None,
        error: BaseException | None,
        ended_at_s: float,
    ) -> None:
        span, settings = self._span, self._recorder.settings
        found = attributes.of_record(record)
        if timeline.tokens:
            found[names.RESPONSE_TIME_TO_FIRST_CHUNK] = taken_at(timeline.tokens[0]) - self._started_at_s
        span.set_attributes(found)
        if settings.record_content and output_text is not None:
            said = content.output_messages(output_text, record.finish_reason, settings.content_limit)
            span.set_attribute(names.OUTPUT_MESSAGES, said)
        if record.finish_reason == FinishReason.CANCELLED:
            span.set_attribute(names.CANCELLED, True)
        if error is not None:
            self._recorder.record_error(span, error, at_s=ended_at_s)
        elif record.error is not None:
            # Only the words are left of it, and they may quote the prompt.
            span.set_attribute(names.ERROR_TYPE, "_OTHER")
            span.set_status(Status(StatusCode.ERROR, record.error if settings.record_content else None))
        self._record_phases(record, timeline, ended_at_s)

    def _record_phases(self, record: GenerationRecord, timeline: Timeline, ended_at_s: float) -> None:
        wall = self._recorder.anchor.wall
        phases: list[_PhaseSpan] = []
        for phase in timeline.phases():
            steps = sum(phase.started_at_s <= step.started_at_s < phase.ended_at_s for step in timeline.steps)
            found = {f"paceline.{key}": value for key, value in phase.attributes.items()}
            if steps:
                found["paceline.steps"] = steps
            span = self._recorder.tracer.start_span(
                names.phase_span(phase.name),
                context=self._context,
                start_time=wall(phase.started_at_s),
                attributes=found,
            )
            phases.append(_PhaseSpan(span, phase.started_at_s, phase.ended_at_s))
        for event in timeline.events:
            self._add_event(event, phases)
        self._add_deadlines(record, timeline, phases, ended_at_s)
        for child in phases:
            with harmless():
                child.span.end(end_time=wall(child.ended_at_s))

    def _add_event(self, event: TimelineEvent, phases: list[_PhaseSpan]) -> None:
        name = event.name if event.name.startswith("paceline.") else f"paceline.{event.name}"
        self._owner(event.at_s, phases).add_event(
            name,
            content.event_attributes(event.attributes),
            timestamp=self._recorder.anchor.wall(event.at_s),
        )

    def _add_deadlines(
        self, record: GenerationRecord, timeline: Timeline, phases: list[_PhaseSpan], ended_at_s: float
    ) -> None:
        """Mark the time to first token on this span, and the time per token where decoding was."""
        own, tokens = record.slo, timeline.tokens
        slo = self._recorder.slo if own is None else own
        if slo.ttft_ms is not None and record.kind == "chat":
            deadline_s = self._started_at_s + slo.ttft_ms / 1e3
            if (taken_at(tokens[0]) if tokens else ended_at_s) > deadline_s:
                self._recorder.add_deadline(self._span, "ttft", limit_ms=slo.ttft_ms, at_s=deadline_s)
        if slo.tpot_ms is not None and len(tokens) > 1:
            n_after_first = timeline.n_tokens - tokens[0].n_tokens
            # Time per token is a mean: all tokens after the first share one allowance.
            deadline_s = taken_at(tokens[0]) + n_after_first * slo.tpot_ms / 1e3
            if taken_at(tokens[-1]) > deadline_s:
                owner = self._owner(deadline_s, phases)
                self._recorder.add_deadline(owner, "tpot", limit_ms=slo.tpot_ms, at_s=deadline_s)

        if own is not None and own.e2e_ms is not None:
            deadline_s = self._started_at_s + own.e2e_ms / 1e3
            if ended_at_s > deadline_s:
                self._recorder.add_deadline(self._span, "e2e", limit_ms=own.e2e_ms, at_s=deadline_s)

    def _owner(self, at_s: float, phases: list[_PhaseSpan]) -> Span:
        """The span of the phase that ran at that moment, else the span of the call."""
        return next((phase.span for phase in reversed(phases) if phase.covers(at_s)), self._span)

    def _measure(self, record: GenerationRecord, error: BaseException | None, ended_at_s: float) -> None:
        instruments, tokens = self._recorder.instruments, record.timeline.tokens
        failed = error is not None and not is_cancellation(error)
        error_type = content.type_name(error) if error is not None and failed else None
        if error_type is None and error is None and record.error is not None:
            error_type = "_OTHER"
        instruments.record_call(
            self._labels,
            duration_s=max(0.0, ended_at_s - self._started_at_s),
            first_chunk_s=taken_at(tokens[0]) - self._started_at_s if tokens else None,
            error_type=error_type,
        )
        instruments.record_chunks(self._labels, tokens)
        instruments.record_usage(self._labels, record.usage)


def is_cancellation(error: BaseException) -> bool:
    """The caller left; nothing went wrong."""
    return isinstance(error, asyncio.CancelledError | GeneratorExit | KeyboardInterrupt)


def _end_of(timeline: Timeline, *, now_s: Callable[[], float]) -> float:
    """When the call ended for the caller: the engine's end or the last chunk's delivery."""
    last_s = taken_at(timeline.tokens[-1]) if timeline.tokens else timeline.submitted_at_s
    finished_at_s = timeline.finished_at_s
    # A call that broke off was never finished by the engine: it ends where it is ended.
    return max(last_s, now_s() if finished_at_s is None else finished_at_s)


def _closed(timeline: Timeline, ended_at_s: float) -> Timeline:
    """The timeline with an end, so that the phase it broke off in is drawn too."""
    return timeline if timeline.finished_at_s is not None else replace(timeline, finished_at_s=ended_at_s)
