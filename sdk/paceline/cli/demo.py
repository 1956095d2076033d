"""One turn of an airline agent, played under budgets on a real model."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.cli import airline
from paceline.cli.progress import StageTimes, progress_bar
from paceline_engine.errors import InfeasibleError

if TYPE_CHECKING:
    from paceline import AsyncTurn
    from paceline.calibrate import ProfileOption
    from paceline.report import Report
    from paceline_policies.slo import SLO

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the command line asked for."""

    question: str
    slo: SLO
    model: str
    max_tokens: int
    warm: bool
    otlp_endpoint: str | None
    profile: ProfileOption


@dataclass(frozen=True, slots=True, kw_only=True)
class Acted:
    """What the agent did in its turn, as far as it came."""

    tool: str = ""
    tool_result: str = ""
    answer: str = ""
    refused: InfeasibleError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What the demo came to."""

    report: Report
    acted: Acted
    start: StageTimes
    warm_ms: float | None


def run(options: DemoOptions, *, as_json: bool) -> None:
    """Play the turn and print it.

    Raises:
        PacelineError: the model cannot be had, or an option makes no sense.
    """
    # Standard output holds the one JSON object alone.
    say: Say = (lambda _: None) if as_json else (lambda text: print(text, end="", flush=True))
    played = asyncio.run(_play(options, say))
    if as_json:
        print(json.dumps(_to_dict(options, played), indent=2))
        return
    say(f"\n\n{played.report}\n")
    if played.acted.refused is not None:
        say(f"refused: {played.acted.refused}\n")


async def _play(options: DemoOptions, say: Say) -> Played:
    import paceline

    tracing = paceline.tracing.configure(endpoint=options.otlp_endpoint) if options.otlp_endpoint else None
    messages = airline.conversation()
    warm_ms: float | None = None
    try:
        with progress_bar() as show, StageTimes(show) as start:
            client = await paceline.AsyncClient(
                options.model, slo=options.slo, profile=options.profile, on_progress=start
            ).__aenter__()
        say(f"Started {options.model} in {start}.\n")
        try:
            if options.warm:
                warm_ms = await _warm(client, messages, say)
            say(f"\ncustomer: {options.question}\n")
            messages.append({"role": "user", "content": options.question})
            async with client.turn(name="airline_agent") as turn:
                acted = await _act(turn, messages, options, say)
            report = turn.report
        finally:
            await client.aclose()
    finally:
        if tracing is not None:
            tracing.shutdown()
    return Played(report=report, acted=acted, start=start, warm_ms=warm_ms)


async def _warm(client: Any, messages: list[dict[str, Any]], say: Say) -> float:
    started = time.monotonic()
    usage = await client.warm(messages)
    warm_ms = (time.monotonic() - started) * 1e3
    say(
        f"The policy and examples, {usage.prompt_tokens} tokens, are in the prefix cache "
        f"({warm_ms:.0f} ms, before the turn).\n"
    )
    return warm_ms


async def _act(turn: AsyncTurn, messages: list[dict[str, Any]], options: DemoOptions, say: Say) -> Acted:
    """Choose a tool by scoring the calls, without decoding, run it, and answer from what it gave."""
    tool, found, answer = "", "", ""
    try:
        choice = await turn.choose(messages, options=[f"\nTool call: {name}" for name in airline.TOOLS])
        tool = str(choice).rpartition(" ")[2]
        say(f"agent calls: {tool}\n")
        async with turn.tool(tool):
            found = await asyncio.to_thread(airline.TOOLS[tool], options.question)
        say(f"tool: {found}\n")
        messages.append(airline.tool_call(tool, options.question))
        messages.append({"role": "tool", "name": tool, "content": found})
        async for chunk in turn.stream(messages, max_tokens=options.max_tokens, stop=["\n"]):
            if chunk.text:
                say(chunk.text if answer else f"agent:{chunk.text}")
            answer += chunk.text
    except InfeasibleError as error:
        return Acted(tool=tool, tool_result=found, answer=answer.strip(), refused=error)
    return Acted(tool=tool, tool_result=found, answer=answer.strip())


def _to_dict(options: DemoOptions, played: Played) -> dict[str, Any]:
    acted = played.acted
    return {
        "model": options.model,
        "start_s": played.start.to_dict(),
        "warm_ms": played.warm_ms,
        "question": options.question,
        "tool": acted.tool,
        "tool_result": acted.tool_result,
        "answer": acted.answer,
        "refused": str(acted.refused) if acted.refused is not None else None,
        "report": played.report.to_dict(),
    }
