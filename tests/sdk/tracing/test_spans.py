"""The tree of spans of one turn, in memory."""

from __future__ import annotations

import asyncio
import contextvars
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from paceline.tracing import activate
from paceline.tracing.settings import Settings, bind
from paceline.tracing.spans import start_turn
from paceline_engine.errors import InvalidValueError
from paceline_engine.request import Prompt, ScoreRequest
from paceline_policies.slo import SLO

Play = Callable[..., Any]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def duration_ms(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e6


def deadlines(span: ReadableSpan) -> dict[str, float]:
    """Milliseconds from the span's start to each deadline event."""
    assert span.start_time is not None
    return {
        str((event.attributes or {})["paceline.slo.budget"]): (event.timestamp - span.start_time) / 1e6
        for event in span.events
        if event.name == "paceline.slo.deadline"
    }


def test_a_turn_is_a_tree_of_calls_phases_and_tools(play: Play, captured: Any) -> None:
    """The agent's span holds the model call and the tool; the call holds its phases."""
    play().run()
    assert captured.children("invoke_agent assistant") == ["chat gemma3-270m", "execute_tool search"]
    assert captured.children("chat gemma3-270m") == [
        "paceline.decide",
        "paceline.decode",
        "paceline.prefill",
        "paceline.queue",
    ]
    assert captured.named("invoke_agent assistant").parent is None
    assert captured.named("chat gemma3-270m").kind is SpanKind.CLIENT
    assert len(captured.spans) == 7


def test_phases_have_the_times_of_the_timeline(play: Play, captured: Any) -> None:
    """Each phase lasts as long as the timeline says, and they follow one another without gaps."""
    play().run()
    queue, prefill, decode = (captured.named(f"paceline.{n}") for n in ("queue", "prefill", "decode"))
    assert duration_ms(queue) == pytest.approx(50, abs=0.01)
    assert duration_ms(prefill) == pytest.approx(250, abs=0.01)
    assert duration_ms(decode) == pytest.approx(160, abs=0.01)
    decide = captured.named("paceline.decide")
    assert duration_ms(decide) == pytest.approx(10, abs=0.01)
    assert attributes(decide) == {"paceline.decision.action": "run", "paceline.decision.modes": 2}
    assert duration_ms(captured.named("invoke_agent assistant")) == pytest.approx(600, abs=0.01)
    assert queue.end_time == prefill.start_time
    assert prefill.end_time == decode.start_time
    assert attributes(prefill)["paceline.cached_tokens"] == 40
    assert attributes(prefill)["paceline.steps"] == 1


def test_the_wall_time_of_a_turn_is_that_of_its_start(play: Play, captured: Any) -> None:
    """A turn that began a second ago on the monotonic clock began a second ago on the wall clock."""
    before_ns = time.time_ns()
    play().run()
    started = captured.named("invoke_agent assistant").start_time
    assert started is not None
    assert -2e9 < started - before_ns < 0


@pytest.mark.parametrize("step_s", [2.0, -2.0, 3600.0])
def test_a_step_of_the_wall_clock_changes_no_duration(
    play: Play, captured: Any, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    """The wall clock steps between the request and the first token: durations and order stay."""
    real = time.time_ns
    turn_played = play()
    turn = turn_played.begin()
    chat = turn_played.chat(turn)
    monkeypatch.setattr(time, "time_ns", lambda: real() + int(step_s * 1e9))
    record = turn_played.record()
    chat.end(record)
    turn.end(turn_played.report(record))
    assert duration_ms(captured.named("invoke_agent assistant")) == pytest.approx(600, abs=0.01)
    assert duration_ms(captured.named("paceline.prefill")) == pytest.approx(250, abs=0.01)
    turn_span, decode = captured.named("invoke_agent assistant"), captured.named("paceline.decode")
    assert turn_span.start_time < decode.start_time < decode.end_time < turn_span.end_time


def test_a_manual_clock_gives_the_same_durations_today(play: Play, captured: Any) -> None:
    """Stamps of a clock that starts at 0 are drawn at the present time."""
    play(started_at_s=0.0).run()
    span = captured.named("invoke_agent assistant")
    assert duration_ms(span) == pytest.approx(600, abs=0.01)
    assert abs(span.start_time - time.time_ns()) < 60e9


def test_the_turn_has_budgets_and_verdicts_as_scalars(play: Play, captured: Any) -> None:
    """What was asked for and what came of it are flat attributes that a search can find."""
    play().run()
    found = attributes(captured.named("invoke_agent assistant"))
    assert found["gen_ai.operation.name"] == "invoke_agent"
    assert found["gen_ai.agent.name"] == "assistant"
    assert (found["paceline.slo.ttft_ms"], found["paceline.slo.tpot_ms"]) == (200, 30)
    assert found["paceline.slo.e2e_ms"] == 400
    assert found["paceline.slo.confidence"] == 0.9
    assert found["paceline.slo.met"] is False
    assert found["paceline.slo.missed"] == "ttft,tpot,e2e"
    assert found["paceline.slo.blame"] == "prefill"
    assert found["paceline.slo.e2e.blame"] == "tool"
    assert found["paceline.slo.ttft.measured_ms"] == 311
    assert found["paceline.slo.ttft.met"] is False
    assert found["paceline.slo.ttft.over_ms"] == pytest.approx(111)
    assert found["paceline.phase.prefill_ms"] == pytest.approx(250)
    assert found["paceline.phase.tool_ms"] == pytest.approx(100)


def test_the_call_has_usage_sampling_and_decision(play: Play, captured: Any) -> None:
    """The chat span tells tokens, time to first chunk in seconds, the chosen mode and the rejected ones."""
    play().run()
    found = attributes(captured.named("chat gemma3-270m"))
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.request.model"] == "gemma3-270m"
    assert found["gen_ai.request.max_tokens"] == 40
    assert found["gen_ai.request.temperature"] == 0.5
    assert found["gen_ai.request.seed"] == 7
    assert found["gen_ai.usage.input_tokens"] == 100
    assert found["gen_ai.usage.output_tokens"] == 5
    assert found["gen_ai.usage.cache_read.input_tokens"] == 40
    assert found["gen_ai.response.finish_reasons"] == ("stop",)
    assert found["gen_ai.response.time_to_first_chunk"] == pytest.approx(0.311)
    assert found["paceline.kind"] == "chat"
    assert found["paceline.decision.mode"] == "int8+ngramx4"
    assert found["paceline.decision.variant"] == "int8"
    assert found["paceline.decision.feasible"] is True
    assert found["paceline.decision.action"] == "run"
    assert found["paceline.decision.ttft.p90_ms"] == pytest.approx(180)
    assert found["paceline.decision.rejected_modes"] == "bf16"
    [rejected] = json.loads(found["paceline.decision.rejected"])
    assert rejected["why"] == "ttft p90 480 ms is 280 ms over 200 ms"
    assert rejected["ttft_p90_ms"] == pytest.approx(480)


def test_deadlines_are_events_at_their_moment(play: Play, captured: Any) -> None:
    """A budget that passed unmet is an event at start plus limit, on the span it belongs to."""
    play().run()
    assert deadlines(captured.named("invoke_agent assistant")) == {"e2e": pytest.approx(400, abs=0.01)}
    assert deadlines(captured.named("chat gemma3-270m")) == {"ttft": pytest.approx(200, abs=0.01)}
    # Four tokens after the first at 30 ms each, counted from when the first was taken.
    assert deadlines(captured.named("paceline.decode")) == {"tpot": pytest.approx(121, abs=0.01)}


def test_budgets_that_were_kept_leave_no_event(play: Play, captured: Any) -> None:
    """With room to spare, and without budgets at all, there is no deadline event."""
    play(slo=SLO(ttft_ms=5000, tpot_ms=500, e2e_ms=9000)).run()
    play(slo=SLO(ttft_ms=None, tpot_ms=None, e2e_ms=None)).run()
    assert all(event.name != "paceline.slo.deadline" for span in captured.spans for event in span.events)


def test_a_missed_budget_is_no_error(play: Play, captured: Any) -> None:
    """A turn that missed its budgets and answered has no ERROR status."""
    play().run()
    assert {span.status.status_code for span in captured.spans} == {StatusCode.UNSET}


def test_events_of_the_engine_stand_on_the_phase_they_fell_in(play: Play, captured: Any) -> None:
    """A change of mode is an event of decode, a preemption in the queue one of queue; scalars alone stay."""
    play().run()
    [mode] = [e for e in captured.named("paceline.decode").events if e.name == "paceline.mode"]
    assert dict(mode.attributes) == {"from": "int8", "to": "int4"}
    assert [e.name for e in captured.named("paceline.queue").events] == ["paceline.preempted"]


def test_choose_is_a_chat_span_of_its_kind(play: Play, captured: Any) -> None:
    """Scoring options is drawn as a chat operation with paceline.kind choose and no decode."""
    played = play()
    turn = played.begin()
    prompt = Prompt(messages=(), token_ids=(1,), n_tokens=1)
    chat = played.chat(turn, ScoreRequest(id="r1", prompt=prompt, options=("yes", "no")))
    full = played.record().timeline
    record = played.record(
        kind="choose",
        timeline=type(full)(
            mode=full.mode,
            submitted_at_s=full.submitted_at_s,
            started_at_s=full.started_at_s,
            finished_at_s=full.submitted_at_s + 0.1,
        ),
    )
    chat.end(record, output_text="yes")
    turn.end(played.report(record))
    found = attributes(captured.named("chat gemma3-270m"))
    assert found["paceline.kind"] == "choose"
    assert found["gen_ai.operation.name"] == "chat"
    assert found["paceline.options"] == 2
    assert "gen_ai.response.time_to_first_chunk" not in found
    assert captured.children("chat gemma3-270m") == ["paceline.decide", "paceline.prefill", "paceline.queue"]


def test_an_error_is_recorded_on_call_and_turn(play: Play, captured: Any) -> None:
    """A failed call has status ERROR, its type and where it was raised."""
    played = play()
    turn = played.begin()
    chat = played.chat(turn)
    try:
        raise InvalidValueError("stop", observed="x", limit="y", remedy="z")
    except InvalidValueError as raised:
        error = raised
    record = played.record(finish_reason=None, error=f"InvalidValueError: {error}")
    chat.end(record, error=error)
    turn.end(played.report(record), error=error)
    for name in ("chat gemma3-270m", "invoke_agent assistant"):
        span = captured.named(name)
        assert span.status.status_code is StatusCode.ERROR
        assert attributes(span)["error.type"] == "paceline_engine.errors.InvalidValueError"
        [event] = [event for event in span.events if event.name == "exception"]
        assert "test_spans.py" in event.attributes["exception.stacktrace"]
    assert "paceline.cancelled" not in attributes(captured.named("invoke_agent assistant"))


@pytest.mark.parametrize("error", [asyncio.CancelledError(), GeneratorExit(), None])
def test_a_cancelled_call_is_marked_and_is_no_error(
    play: Play, captured: Any, error: BaseException | None
) -> None:
    """However the stream was left, there is one ended span with the usage so far and a mark."""
    played = play()
    turn = played.begin()
    chat = played.chat(turn)
    record = played.record(finish_reason="cancelled")
    chat.end(record, error=error)
    chat.end(played.record(), error=RuntimeError("too late"))
    turn.end(played.report(record), error=error)
    turn.end(played.report(record))
    span = captured.named("chat gemma3-270m")
    assert attributes(span)["paceline.cancelled"] is True
    assert attributes(span)["gen_ai.usage.output_tokens"] == 5
    assert span.status.status_code is StatusCode.UNSET
    assert captured.named("invoke_agent assistant").status.status_code is StatusCode.UNSET


def test_a_call_that_broke_off_in_prefill_is_drawn_up_to_its_end(play: Play, captured: Any) -> None:
    """Without a first token and without an end from the engine, queue and prefill are still there."""
    played = play()
    turn = played.begin()
    chat = played.chat(turn)
    full = played.record().timeline
    broken = type(full)(mode=full.mode, submitted_at_s=full.submitted_at_s, started_at_s=full.started_at_s)
    record = played.record(timeline=broken, finish_reason="cancelled")
    chat.end(record)
    turn.end(played.report(record))
    assert captured.children("chat gemma3-270m") == ["paceline.decide", "paceline.prefill", "paceline.queue"]
    assert captured.named("paceline.prefill").end_time == captured.named("chat gemma3-270m").end_time


def test_the_turn_ends_what_is_still_open(play: Play, captured: Any) -> None:
    """A dropped stream and a tool that never returned end with the turn, as cancelled."""
    played = play()
    turn = played.begin()
    known = played.chat(turn)
    played.request_id = "r2"
    unknown = played.chat(turn)
    tool = turn.start_tool("search", started_at_s=played.started_at_s + 0.1)
    played.request_id = "r1"
    turn.end(played.report(played.record(finish_reason="cancelled")))
    chats = [span for span in captured.spans if span.name == "chat gemma3-270m"]
    assert len(chats) == 2
    assert all(attributes(span)["paceline.cancelled"] is True for span in chats)
    assert sorted("gen_ai.usage.output_tokens" in attributes(span) for span in chats) == [False, True]
    assert attributes(captured.named("execute_tool search"))["paceline.cancelled"] is True
    count = len(captured.spans)
    known.end(played.record())
    unknown.end(played.record())
    tool.end(ended_at_s=played.started_at_s + 9)
    assert len(captured.spans) == count


def test_end_from_many_threads_ends_once(play: Play, captured: Any) -> None:
    """Sixteen threads end the same call at the same time: one span comes out."""
    played = play()
    turn = played.begin()
    chat = played.chat(turn)
    record = played.record()
    barrier = threading.Barrier(16)

    def end() -> None:
        barrier.wait()
        chat.end(record)

    with ThreadPoolExecutor(16) as pool:
        for future in [pool.submit(end) for _ in range(16)]:
            future.result()
    assert len([span for span in captured.spans if span.name == "chat gemma3-270m"]) == 1


def test_calls_in_a_pool_are_children_of_the_caller(play: Play, captured: Any) -> None:
    """Two turns started in pool threads with a copied context are children of the caller's span."""
    tracer = captured.provider.get_tracer("app")
    with tracer.start_as_current_span("request"), ThreadPoolExecutor(2) as pool:
        barrier = threading.Barrier(2)

        def call(name: str) -> None:
            barrier.wait()
            play(name=name).run()

        for future in [
            pool.submit(contextvars.copy_context().run, call, name) for name in ("first", "second")
        ]:
            future.result()
    assert captured.children("request") == ["invoke_agent first", "invoke_agent second"]


def test_a_parent_may_be_handed_over(captured: Any) -> None:
    """A turn started in a bare thread takes the parent that was captured at the call."""
    tracer = captured.provider.get_tracer("app")
    with tracer.start_as_current_span("request"):
        parent = context_api.get_current()
    with ThreadPoolExecutor(1) as pool:
        turn = pool.submit(
            start_turn, "a", slo=SLO(), started_at_s=0.0, parent=parent, tracer_provider=captured.provider
        ).result()
    assert trace.get_current_span(turn.context).parent.span_id == captured.named("request").context.span_id


def test_calls_of_one_turn_in_bare_threads_are_its_children(play: Play, captured: Any) -> None:
    """The parent is the turn, not whatever span is current in the worker thread."""
    played = play()
    turn = played.begin()
    tracer = captured.provider.get_tracer("app")

    def call(request_id: str) -> None:
        with tracer.start_as_current_span("unrelated"):
            chat = played.chat(turn, played.request(id=request_id))
            chat.end(played.record(id=request_id))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(call, ["r1", "r2"]))
    turn.end(played.report())
    assert captured.children("invoke_agent assistant") == ["chat gemma3-270m"] * 2


def test_the_callers_spans_nest_inside_turn_and_tool(play: Play, captured: Any) -> None:
    """With the contexts made current, own spans and model calls inside a tool nest where they belong."""
    played = play()
    tracer = captured.provider.get_tracer("app")
    turn = played.begin()
    with activate(turn.context):
        with tracer.start_as_current_span("plan"):
            played.chat(turn).end(played.record())
        tool = turn.start_tool("search", started_at_s=played.started_at_s + 0.5)
        with activate(tool.context), tracer.start_as_current_span("fetch"):
            pass
        tool.end(ended_at_s=played.started_at_s + 0.6)
    turn.end(played.report())
    assert captured.children("invoke_agent assistant") == ["execute_tool search", "plan"]
    assert captured.children("plan") == ["chat gemma3-270m"]
    assert captured.children("execute_tool search") == ["fetch"]


def test_leaving_in_another_task_is_quiet(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    """A turn closed by another task than the one that opened it logs nothing and leaks no context."""
    turn = play().begin()

    async def main() -> None:
        async def enter() -> Any:
            return activate(turn.context)

        activation = await asyncio.create_task(enter())
        activation.end()
        activation.end()

    before = context_api.get_current()
    asyncio.run(main())
    with activate(turn.context):
        pass
    assert context_api.get_current() == before
    assert not caplog.records


@pytest.mark.parametrize("kind", ["no-op", "not sampled"])
def test_without_recording_everything_may_still_be_called(play: Play, kind: str) -> None:
    """With the no-op default, and in a trace that is not sampled, there is no trace id and no error."""
    provider = trace.NoOpTracerProvider() if kind == "no-op" else TracerProvider(sampler=ALWAYS_OFF)
    turn = play(provider=provider).run(error=RuntimeError("x"))
    assert turn.trace_id is None


def test_the_trace_id_is_that_of_the_exported_spans(play: Play, captured: Any) -> None:
    """The id that a report shows finds the trace, also after the turn has ended."""
    turn = play().run()
    span = captured.named("invoke_agent assistant")
    assert turn.trace_id == trace.format_trace_id(span.context.trace_id)


class Unprintable:
    """An object that has no text."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


def test_what_cannot_be_recorded_does_not_reach_the_turn(
    play: Play, captured: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A tool's odd attributes and an error without a text cost their attributes, not the turn."""
    bind(captured.provider, Settings(record_content=True))
    played = play(name="x" * 8_000_000)
    turn = played.begin()
    odd = {"arguments": Unprintable(), 3: "three", "fine": 1}
    tool = turn.start_tool("t" * 8_000_000, started_at_s=played.started_at_s, attributes=odd)
    tool.end(ended_at_s=played.started_at_s + 0.1, error=ValueError(Unprintable()))
    turn.end(played.report())
    assert len(captured.spans) == 2
    assert all(len(span.name) < 300 for span in captured.spans)
    assert {record.name for record in caplog.records} <= {"paceline.tracing", "opentelemetry.attributes"}


def test_a_broken_processor_does_not_reach_the_turn(play: Play, captured: Any) -> None:
    """A span processor of the application that raises at the end of every span is not the turn's problem."""

    class Broken(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            raise RuntimeError(span.name)

    captured.provider.add_span_processor(Broken())
    play().run()
    assert len(captured.spans) == 7
    assert captured.named("chat gemma3-270m").attributes["gen_ai.usage.output_tokens"] == 5
