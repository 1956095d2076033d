"""One turn of an airline agent, played under budgets on a real model."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from paceline.cli.progress import progress_bar
from paceline_engine.errors import InfeasibleError

if TYPE_CHECKING:
    from paceline.report import Report
    from paceline_policies.slo import SLO

TOOLS = ("get_reservation_details", "search_flights", "transfer_to_human")
QUESTION = "Hi, my booking is KX4TRM. What time does my flight leave, and can I still change it?"
NETWORK_DELAY_S = 0.12
"""The reservation system answers over a network in an airline; here the wait stands in for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What the demo's turn came to."""

    report: Report
    tool: str
    tool_result: str
    answer: str
    warm_ms: float | None
    error: InfeasibleError | None


def run(
    *, slo: SLO, model: str, max_tokens: int, warm: bool, otlp_endpoint: str | None, as_json: bool
) -> None:
    """Play the turn and print it.

    Raises:
        PacelineError: the model cannot be had, or an option makes no sense.
    """
    out = _silent if as_json else _say
    played = asyncio.run(
        _play(slo=slo, model=model, max_tokens=max_tokens, warm=warm, otlp_endpoint=otlp_endpoint, out=out)
    )
    if as_json:
        print(json.dumps(_to_dict(played), indent=2))
        return
    out(f"\n\n{played.report}\n")
    if played.error is not None:
        out(f"refused: {played.error}\n")


async def _play(
    *,
    slo: SLO,
    model: str,
    max_tokens: int,
    warm: bool,
    otlp_endpoint: str | None,
    out: Callable[[str], None],
) -> Played:
    import paceline

    tracing = paceline.tracing.configure(endpoint=otlp_endpoint) if otlp_endpoint else None
    policy = files("paceline").joinpath("data/airline_policy.txt").read_text(encoding="utf-8")
    messages: list[dict[str, Any]] = [{"role": "system", "content": policy}]
    tool, found, answer, warm_ms = "", "", "", None
    error: InfeasibleError | None = None
    try:
        with progress_bar() as on_progress:
            client = await paceline.AsyncClient(model, slo=slo, on_progress=on_progress).__aenter__()
        try:
            if warm:
                started = time.monotonic()
                await client.warm(messages)
                warm_ms = (time.monotonic() - started) * 1e3
                out(f"The system policy is in the prefix cache ({warm_ms:.0f} ms, before the turn).\n")
            out(f"\ncustomer: {QUESTION}\n")
            messages.append({"role": "user", "content": QUESTION})
            async with client.turn(name="airline_agent") as turn:
                try:
                    tool, found = await _use_tool(turn, messages, out)
                    answer = await _answer(turn, messages, tool, found, max_tokens, out)
                except InfeasibleError as refused:
                    error = refused
            report = turn.report
        finally:
            await client.aclose()
    finally:
        if tracing is not None:
            tracing.shutdown()
    return Played(report=report, tool=tool, tool_result=found, answer=answer, warm_ms=warm_ms, error=error)


async def _use_tool(turn: Any, messages: list[dict[str, Any]], out: Callable[[str], None]) -> tuple[str, str]:
    """Choose a tool by scoring the names, without decoding, then call it."""
    choice = await turn.choose(messages, options=list(TOOLS))
    out(f"agent calls: {choice}\n")
    async with turn.tool(str(choice)):
        found = await asyncio.to_thread(_reservation, "KX4TRM")
    out(f"tool: {found}\n")
    return str(choice), found


async def _answer(
    turn: Any,
    messages: list[dict[str, Any]],
    tool: str,
    found: str,
    max_tokens: int,
    out: Callable[[str], None],
) -> str:
    messages.append({"role": "tool", "name": tool, "content": found})
    text = ""
    out("agent: ")
    async for chunk in turn.stream(messages, max_tokens=max_tokens, stop=["\n"]):
        text += chunk.text
        out(chunk.text)
    return text


def _reservation(code: str) -> str:
    """Look the booking up in a small database, at the distance of a network."""
    time.sleep(NETWORK_DELAY_S)
    database = sqlite3.connect(":memory:")
    try:
        database.execute("create table booking (code text, flight text, leaves text, fare text)")
        database.execute(
            "insert into booking values ('KX4TRM', 'NW 218 Oslo to Lisbon', 'Friday 6 March, 09:40', 'Flex')"
        )
        row = database.execute("select flight, leaves, fare from booking where code = ?", (code,)).fetchone()
    finally:
        database.close()
    return f"{row[0]}, {row[1]}, {row[2]} fare"


def _to_dict(played: Played) -> dict[str, Any]:
    return {
        "question": QUESTION,
        "tool": played.tool,
        "tool_result": played.tool_result,
        "answer": played.answer,
        "warm_ms": played.warm_ms,
        "refused": str(played.error) if played.error is not None else None,
        "report": played.report.to_dict(),
    }


def _say(text: str) -> None:
    print(text, end="", flush=True, file=sys.stdout)


def _silent(text: str) -> None:
    """Standard output holds the one JSON object alone."""
