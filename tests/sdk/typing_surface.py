"""The types of the public surface, checked by mypy and pyright; nothing here runs."""

from __future__ import annotations

from typing import assert_type

import paceline
from paceline.testing import ManualClock, Reply, ScriptedBackend


async def asynchronous() -> None:
    clock = ManualClock()
    backend = ScriptedBackend([Reply("a"), "b"], clock=clock)
    async with paceline.AsyncClient(backend=backend, clock=clock, slo=paceline.SLO(ttft_ms=100)) as client:
        assert_type(client, paceline.AsyncClient)
        assert_type(await client.warm("policy"), paceline.Usage)
        async with client.turn("agent", slo=paceline.SLO()) as turn:
            assert_type(turn, paceline.AsyncTurn)
            stream = turn.stream([{"role": "user", "content": "hi"}], max_tokens=4, temperature=0.5)
            assert_type(stream, paceline.AsyncStream)
            async for chunk in stream:
                assert_type(chunk, paceline.Chunk)
            answer = await turn.generate("hi", stop=["\n"], seed=1)
            assert_type(answer, paceline.Answer)
            assert_type(answer.text, str)
            await turn.generate("hi", json_schema={"type": "object"})
            await turn.generate("hi", json_schema=ManualClock)
            await turn.generate("hi", regex="[a-z]+")
            await turn.generate("hi", one_of=["a", "b"])
            label = await turn.choose("hi", options=["a", "b"])
            assert_type(label, paceline.Choice)
            assert_type(await turn.plan("hi"), paceline.Decision)
            async with turn.tool("lookup"):
                pass
            assert_type(turn.remaining_ms(), float | None)
        assert_type(turn.report, paceline.Report)
        assert_type(turn.report.verdicts, tuple[paceline.Verdict, ...])
    assert_type(paceline.current_turn(), paceline.AsyncTurn | paceline.Turn | None)


def synchronous() -> None:
    with paceline.Client(backend=ScriptedBackend("a")) as client, client.turn() as turn:
        assert_type(turn, paceline.Turn)
        for chunk in turn.stream("hi", max_tokens=4):
            assert_type(chunk, paceline.Chunk)
        assert_type(turn.generate("hi"), paceline.Answer)
        assert_type(turn.choose("hi", options=["a"]), paceline.Choice)
        assert_type(turn.plan("hi"), paceline.Decision)
        with turn.tool("lookup"):
            pass
        assert_type(turn.report, paceline.Report)
