"""However a stream is left, its generation is cancelled, recorded and its span ended exactly once."""

from __future__ import annotations

import asyncio
import gc

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import paceline
from paceline.errors import ClosedError
from paceline.testing import ManualClock, Reply, ScriptedBackend


async def _read(turn):
    async for _ in turn.stream("hi", max_tokens=8):
        pass


async def _break(turn):
    async for _ in turn.stream("hi", max_tokens=8):
        break


async def _aclose(turn):
    stream = turn.stream("hi", max_tokens=8)
    await anext(stream)
    await stream.aclose()
    await stream.aclose()
    with pytest.raises(ClosedError):
        await anext(stream)


async def _with(turn):
    async with turn.stream("hi", max_tokens=8) as stream:
        await anext(stream)


async def _error_in_body(turn):
    async def fail():
        async for _ in turn.stream("hi", max_tokens=8):
            raise KeyError("mine")

    with pytest.raises(KeyError):
        await fail()


async def _drop(turn):
    stream = turn.stream("hi", max_tokens=8)
    await anext(stream)
    del stream
    gc.collect()


async def _cancel(turn):
    began = asyncio.Event()

    async def read():
        async for _ in turn.stream("hi", max_tokens=8):
            began.set()

    task = asyncio.create_task(read())
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _leave_open(turn):
    turn.kept = turn.stream("hi", max_tokens=8)
    await anext(turn.kept)


WAYS = {
    "read": (_read, "stop", 4),
    "break": (_break, "cancelled", 1),
    "aclose": (_aclose, "cancelled", 1),
    "with": (_with, "cancelled", 1),
    "error in the body": (_error_in_body, "cancelled", 1),
    "drop": (_drop, "cancelled", 1),
    "cancel": (_cancel, "cancelled", 1),
    "turn closed": (_leave_open, "cancelled", 1),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_out_ends_one_span_and_frees_the_backend(way, monkeypatch):
    """One ended span and one record, with the usage so far; nothing runs on the backend."""
    leave, reason, n_tokens = WAYS[way]
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    clock = ManualClock()
    backend = ScriptedBackend("one two three four", clock=clock)

    async def main():
        async with paceline.AsyncClient(backend=backend, clock=clock) as client:
            async with client.turn() as turn:
                await leave(turn)
            return turn.report

    report = asyncio.run(main())
    assert [record.finish_reason for record in report.generations] == [reason]
    assert report.generations[0].usage.completion_tokens == n_tokens
    assert backend.running == set()
    assert len(backend.cancelled) == (0 if reason == "stop" else 1)
    names = [span.name for span in exporter.get_finished_spans()]
    assert names.count("chat scripted") == 1
    assert names.count("invoke_agent agent") == 1


def test_closing_the_turn_under_a_reader_is_an_error_there():
    """A task that reads while the turn closes gets ClosedError, and is not itself cancelled."""
    clock = ManualClock()
    backend = ScriptedBackend(Reply("a b c", stall_after=1), clock=clock)

    async def main():
        async with paceline.AsyncClient(backend=backend, clock=clock, tracing=False) as client:
            async with client.turn(slo=paceline.SLO(stall_ms=None, e2e_ms=None)) as turn:
                began = asyncio.Event()

                async def read_on():
                    async for _ in turn.stream("hi", max_tokens=8):
                        began.set()

                async def read():
                    with pytest.raises(ClosedError, match="turn was closed"):
                        await read_on()
                    return "alive"

                task = asyncio.create_task(read())
                await began.wait()
            assert await task == "alive"
            assert [record.finish_reason for record in turn.report.generations] == ["cancelled"]

    asyncio.run(main())
    assert backend.running == set()


def test_cancelling_generate_and_choose_is_recorded():
    """Cancelled whole calls leave a cancelled record."""
    clock = ManualClock()
    backend = ScriptedBackend(Reply("a b", stall_after=0), clock=clock)

    async def main():
        async with paceline.AsyncClient(backend=backend, clock=clock, tracing=False) as client:
            async with client.turn(slo=paceline.SLO(stall_ms=None, e2e_ms=None)) as turn:
                task = asyncio.create_task(turn.generate("hi", max_tokens=8))
                for _ in range(50):
                    await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            return turn.report

    report = asyncio.run(main())
    assert [record.finish_reason for record in report.generations] == ["cancelled"]
    assert backend.running == set()


def test_two_readers_of_one_stream_are_refused():
    """A stream is read by one task at a time."""
    clock = ManualClock()
    backend = ScriptedBackend("a b c", clock=clock)

    async def main():
        client = paceline.AsyncClient(backend=backend, clock=clock, tracing=False)
        async with client, client.turn() as turn:
            stream = turn.stream("hi", max_tokens=8)
            results = await asyncio.gather(anext(stream), anext(stream), return_exceptions=True)
            assert sum(isinstance(result, ClosedError) for result in results) == 1

    asyncio.run(main())


def test_a_turns_span_ends_with_the_error_of_its_body():
    """An error in the turn's body passes through, and the turn is closed."""
    clock = ManualClock()

    async def main():
        async with paceline.AsyncClient(backend=ScriptedBackend("a", clock=clock), clock=clock) as client:
            turn = client.turn()
            with pytest.raises(ZeroDivisionError):
                async with turn:
                    raise ZeroDivisionError
            assert turn.closed
            assert turn.report.generations == ()

    asyncio.run(main())
