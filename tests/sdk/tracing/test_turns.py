"""Spans of turns that the SDK runs, against the scripted backend."""

from __future__ import annotations

import asyncio
import contextvars
import gc
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

import paceline
from paceline.testing import ManualClock, Reply, ScriptedBackend
from paceline_engine.errors import BackendError

pytestmark = pytest.mark.usefixtures("fresh_globals")

PROMPT = "narwhal-prompt"
REPLY = Reply("alpha-answer beta-answer gamma-answer delta-answer", prefill_ms=120)


@pytest.fixture
def spans(captured: Any) -> Any:
    """What the process's tracer provider exports."""
    trace.set_tracer_provider(captured.provider)
    return captured


def chats(captured: Any) -> list[Any]:
    return [span for span in captured.spans if span.name == "chat scripted"]


KEPT_OPEN: contextvars.ContextVar[Any] = contextvars.ContextVar("kept_open")


async def read_all(turn: Any) -> None:
    async for _ in turn.stream(PROMPT):
        pass


async def leave_by_break(turn: Any) -> None:
    async for _ in turn.stream(PROMPT):
        break


async def leave_by_aclose(turn: Any) -> None:
    stream = turn.stream(PROMPT)
    await anext(stream)
    await stream.aclose()
    await stream.aclose()


async def leave_by_context(turn: Any) -> None:
    async with turn.stream(PROMPT) as stream:
        await anext(stream)


async def leave_by_drop(turn: Any) -> None:
    stream = turn.stream(PROMPT)
    await anext(stream)
    del stream
    gc.collect()
    await asyncio.sleep(0)


async def leave_by_cancel(turn: Any) -> None:
    taken = asyncio.Event()

    async def read() -> None:
        async for _ in turn.stream(PROMPT):
            taken.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(read())
    await taken.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_with_the_turn(turn: Any) -> None:
    """The turn ends while the stream is open and still referred to."""
    stream = turn.stream(PROMPT)
    await anext(stream)
    KEPT_OPEN.set(stream)


@pytest.mark.parametrize(
    "leave",
    [
        leave_by_break,
        leave_by_aclose,
        leave_by_context,
        leave_by_drop,
        leave_by_cancel,
        leave_with_the_turn,
    ],
)
def test_a_stream_left_early_is_one_cancelled_span(
    spans: Any, leave: Callable[[Any], Awaitable[None]]
) -> None:
    """However a stream is left, one ended span tells the usage so far and that it was cancelled."""
    clock = ManualClock()

    async def main() -> None:
        backend = ScriptedBackend([REPLY], clock=clock)
        async with (
            paceline.AsyncClient(backend=backend, clock=clock) as client,
            client.turn(name="left") as turn,
        ):
            await leave(turn)

    asyncio.run(main())
    [chat] = chats(spans)
    assert chat.attributes["paceline.cancelled"] is True
    assert 0 < chat.attributes["gen_ai.usage.output_tokens"] < 20
    assert chat.end_time is not None
    assert spans.named("invoke_agent left").end_time >= chat.end_time


def test_a_stream_read_to_its_end_is_not_cancelled(spans: Any) -> None:
    """A full read is one span with finish reason stop and the phases that the clock went through."""
    clock = ManualClock()

    async def main() -> None:
        backend = ScriptedBackend([REPLY], clock=clock)
        async with (
            paceline.AsyncClient(backend=backend, clock=clock) as client,
            client.turn(name="read", slo=paceline.SLO(ttft_ms=100)) as turn,
        ):
            await read_all(turn)
            assert turn.trace_id is not None

    asyncio.run(main())
    [chat] = chats(spans)
    assert "paceline.cancelled" not in chat.attributes
    assert chat.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert chat.attributes["gen_ai.response.time_to_first_chunk"] == pytest.approx(0.12, abs=0.02)
    turn = spans.named("invoke_agent read")
    assert turn.attributes["paceline.slo.met"] is False
    assert "ttft" in turn.attributes["paceline.slo.missed"]
    assert turn.attributes["paceline.slo.ttft.blame"] == "prefill"
    assert "paceline.prefill" in spans.children("chat scripted")
    assert [event.name for event in chat.events] == ["paceline.slo.deadline"]


def test_a_failed_call_is_an_error_without_its_words(spans: Any) -> None:
    """A backend's error that quotes the prompt marks call and turn; none of its words are exported."""
    clock = ManualClock()

    async def main() -> None:
        reply = Reply("alpha-answer beta-answer", error_after=1, error=f"refused {PROMPT}")
        backend = ScriptedBackend([reply], clock=clock)
        async with (
            paceline.AsyncClient(backend=backend, clock=clock) as client,
            client.turn(name="failed") as turn,
        ):
            await turn.generate(PROMPT)

    with pytest.raises(BackendError):
        asyncio.run(main())
    [chat] = chats(spans)
    assert chat.status.status_code is trace.StatusCode.ERROR
    assert chat.attributes["error.type"].endswith("BackendError")
    sent = encode_spans(spans.spans).SerializeToString()
    assert b"narwhal" not in sent
    assert b"alpha" not in sent


def test_choose_and_tools_are_in_the_tree(spans: Any) -> None:
    """A turn that chooses, runs a tool with its own span and answers is one tree without its words."""
    clock = ManualClock()
    tracer = spans.provider.get_tracer("app")

    async def main() -> None:
        backend = ScriptedBackend(["refund", REPLY], clock=clock)
        async with (
            paceline.AsyncClient(backend=backend, clock=clock) as client,
            client.turn(name="agent") as turn,
        ):
            await turn.choose(PROMPT, options=["refund", "rebook"])
            async with turn.tool("search", attributes={"arguments": PROMPT}):
                with tracer.start_as_current_span("fetch"):
                    await clock.sleep(0.1)
            await turn.generate(PROMPT)

    asyncio.run(main())
    assert spans.children("invoke_agent agent") == ["chat scripted", "chat scripted", "execute_tool search"]
    assert spans.children("execute_tool search") == ["fetch"]
    assert sorted(chat.attributes["paceline.kind"] for chat in chats(spans)) == ["chat", "choose"]
    assert b"narwhal" not in encode_spans(spans.spans).SerializeToString()


def test_parallel_calls_of_a_sync_client_are_children_of_the_caller(spans: Any) -> None:
    """Two calls in a thread pool with a copied context hang under the span that was current."""
    backend = ScriptedBackend([REPLY, REPLY])
    tracer = spans.provider.get_tracer("app")

    def call(client: paceline.Client, name: str) -> None:
        with client.turn(name=name) as turn:
            turn.generate(PROMPT)

    with (
        paceline.Client(backend=backend) as client,
        ThreadPoolExecutor(2) as pool,
        tracer.start_as_current_span("request"),
    ):
        calls = [pool.submit(contextvars.copy_context().run, call, client, name) for name in ("one", "two")]
        for done in calls:
            done.result()
    assert spans.children("request") == ["invoke_agent one", "invoke_agent two"]
    assert spans.children("invoke_agent one") == ["chat scripted"]
