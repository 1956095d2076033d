"""Moves between variants, drafts and pins, as a trace shows them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry import trace

import paceline
from paceline.testing import ManualClock, ScriptedBackend
from paceline_engine.timeline import VARIANT_CHANGED, TimelineEvent


@pytest.mark.usefixtures("fresh_globals")
def test_a_pinned_prompt_is_told_on_the_tools_span(captured: Any) -> None:
    """The tool's span says how many prompt tokens were to stay cached; without a pin it says nothing."""
    trace.set_tracer_provider(captured.provider)
    clock = ManualClock()
    backend = ScriptedBackend("one two", clock=clock)

    async def main() -> None:
        async with paceline.AsyncClient(backend=backend, clock=clock) as client, client.turn() as turn:
            await turn.generate("hi", max_tokens=4)
            with turn.tool("pinned"):
                pass
            with turn.tool("free", pin=False):
                pass

    asyncio.run(main())
    name = "paceline.cache.pinned_prompt_tokens"
    assert captured.named("execute_tool pinned").attributes[name] > 0
    assert name not in captured.named("execute_tool free").attributes


def test_moves_and_drafts_are_searchable_and_drawn(play: Callable[..., Any], captured: Any) -> None:
    """A move is an event of the decode span with from, to and why; counts stand on call and decode."""
    played = play()
    turn = played.begin()
    chat = played.chat(turn)
    line = played.record().timeline
    why = "behind: 60 ms a token predicted, 45 ms left for each"
    move = TimelineEvent(
        at_s=line.tokens[1].made_at_s,
        name=VARIANT_CHANGED,
        attributes={"from": "int8", "to": "int4", "why": why},
    )
    moved = replace(line, events=(move,), drafted_tokens=12, accepted_tokens=7)
    chat.end(played.record(timeline=moved))
    decode = captured.named("paceline.decode")
    [event] = [each for each in decode.events if each.name == "paceline.variant_changed"]
    assert dict(event.attributes) == {"from": "int8", "to": "int4", "why": why}
    assert decode.attributes["paceline.last_variant"] == "int4"
    for span in (decode, captured.named("chat gemma3-270m")):
        assert span.attributes["paceline.variant_changes"] == 1
        assert span.attributes["paceline.drafted_tokens"] == 12
        assert span.attributes["paceline.accepted_tokens"] == 7
