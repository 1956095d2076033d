"""A prompt that stays cached while a tool runs."""

from __future__ import annotations

import asyncio

import pytest

import paceline
from paceline.errors import BackendError, InvalidValueError
from paceline.testing import ManualClock, ScriptedBackend


def play(body, *, backend=None):
    """Run ``body(turn, clock, backend)`` in a turn; gives the report."""
    clock = ManualClock()
    backend = backend or ScriptedBackend("one two", clock=clock)

    async def main():
        async with paceline.AsyncClient(backend=backend, clock=clock, tracing=False) as client:
            async with client.turn() as turn:
                await body(turn, clock, backend)
            return turn.report

    return asyncio.run(main()), backend


def test_the_last_prompt_is_pinned_while_a_tool_runs():
    """A tool's run pins the prompt of the generation before it, and only as long as it lasts."""

    async def body(turn, clock, backend):
        async with turn.tool("before"):
            assert backend.pinned == {}
        await turn.generate("the first question", max_tokens=4)
        await turn.generate("the second question", max_tokens=4)
        async with turn.tool("lookup"):
            (prompt,) = backend.pinned.values()
            assert prompt.messages[0]["content"] == "the second question"
        assert backend.pinned == {}

    report, _ = play(body)
    assert [tool.pinned_tokens > 0 for tool in report.tools] == [False, True]
    assert report.to_dict()["tools"][1]["pinned_tokens"] == report.tools[1].pinned_tokens


def test_tools_side_by_side_pin_apart():
    """Each of two tools holds a pin of its own until its own end."""

    async def body(turn, clock, backend):
        await turn.generate("hi", max_tokens=4)
        with turn.tool("a"):
            with turn.tool("b"):
                assert len(backend.pinned) == 2
            assert len(backend.pinned) == 1

    assert play(body)[1].pinned == {}


@pytest.mark.parametrize("way", ["error", "cancel", "turn"])
def test_every_way_out_ends_the_pin(way):
    """An error in the tool, cancellation and the end of the turn all let the prompt be evicted again."""
    clock = ManualClock()
    backend = ScriptedBackend("one two", clock=clock)

    async def use(turn, entered):
        await turn.generate("hi", max_tokens=4)
        async with turn.tool("lookup"):
            assert len(backend.pinned) == 1
            entered.set()
            if way == "error":
                raise LookupError("no such order")
            await asyncio.Event().wait()

    async def main():
        client = paceline.AsyncClient(backend=backend, clock=clock, tracing=False)
        async with client, client.turn() as turn:
            if way == "turn":
                await turn.generate("hi", max_tokens=4)
                turn.tool("left open").__enter__()
                assert len(backend.pinned) == 1
                return
            entered = asyncio.Event()
            task = asyncio.ensure_future(use(turn, entered))
            await entered.wait()
            if way == "cancel":
                task.cancel()
            await asyncio.wait([task])
            if way == "error":
                assert isinstance(task.exception(), LookupError)

    asyncio.run(main())
    assert backend.pinned == {}


def test_no_pin_where_none_is_wanted_or_can_be():
    """``pin=False`` pins nothing; a backend that cannot, or that fails, leaves the turn as it was."""

    async def unwanted(turn, clock, backend):
        await turn.generate("hi", max_tokens=4)
        with turn.tool("lookup", pin=False):
            assert backend.pinned == {}

    play(unwanted)

    class Failing(ScriptedBackend):
        def pin(self, pin_id, prompt, *, hold_s, salt="", adapter=None):
            raise BackendError("no room")

    class Unable(ScriptedBackend):
        pin = None
        unpin = None

    async def body(turn, clock, backend):
        await turn.generate("hi", max_tokens=4)
        with turn.tool("lookup"):
            pass

    for kind in (Failing, Unable):
        report, _ = play(body, backend=kind("one two"))
        assert report.tools[0].error is None


def test_a_warmed_prefix_can_be_pinned():
    """``warm`` pins for the seconds given, and refuses a time that is none."""
    backend = ScriptedBackend("one")

    async def main():
        async with paceline.AsyncClient(backend=backend, tracing=False) as client:
            await client.warm("the policy")
            assert backend.pinned == {}
            await client.warm("the policy", pin_s=30)
            assert len(backend.pinned) == 1
            for value in (0, -1, float("inf")):
                with pytest.raises(InvalidValueError, match="pin_s"):
                    await client.warm("the policy", pin_s=value)

    asyncio.run(main())
