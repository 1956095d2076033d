"""The airline behind the demo: what its agent is told, and tools over a small database."""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections.abc import Callable, Mapping
from importlib.resources import files
from types import MappingProxyType
from typing import Any

NETWORK_DELAY_S = 0.12
"""An airline's reservation system answers over a network; here the wait stands in for it."""
SCHEMA = """
create table booking (code text, flight text, leaves text, fare text);
insert into booking values
    ('KX4TRM', 'NW 218 Oslo to Lisbon', 'Friday 6 March at 09:40', 'Flex'),
    ('TB9WZE', 'NW 640 Lisbon to Tromso', 'Thursday 12 March at 13:15', 'Light');
create table fare (name text, changes text);
insert into fare values
    ('Light', 'no changes'), ('Classic', 'change fee 45 euros'), ('Flex', 'changes without a fee');
create table flight (origin text, flight text, leaves text, euros integer);
insert into flight values
    ('Oslo', 'NW 218 Oslo to Lisbon', 'daily at 09:40', 159),
    ('Lisbon', 'NW 219 Lisbon to Oslo', 'daily at 15:05', 149);
"""
CODE = re.compile(r"\b(?=[A-Z0-9]*[A-Z])(?=[A-Z0-9]*[0-9])[A-Z0-9]{6}\b")


def conversation() -> list[dict[str, Any]]:
    """The policy, and worked examples: the default model is a base model and continues what it sees."""
    data = files("paceline").joinpath("data")
    policy = data.joinpath("airline_policy.txt").read_text(encoding="utf-8")
    examples = data.joinpath("airline_examples.jsonl").read_text(encoding="utf-8")
    return [{"role": "system", "content": policy}, *map(json.loads, examples.splitlines())]


def get_reservation_details(question: str) -> str:
    """The booking whose code stands in the question."""
    code = CODE.search(question)
    row = _row(
        "select flight, leaves, fare, changes from booking join fare on fare = name where code = ?",
        "" if code is None else code.group(),
    )
    if row is None:
        return "no booking of that code"
    return f"flight {row[0]}, leaves {row[1]}, {row[2]} fare, {row[3]}"


def search_flights(question: str) -> str:
    """A flight from the city that the question names first."""
    cities = re.findall(r"\b(?:Oslo|Lisbon)\b", question)
    row = _row("select flight, leaves, euros from flight where origin = ?", cities[0] if cities else "")
    return f"flight {row[0]}, leaves {row[1]}, from {row[2]} euros" if row else "no flight was found"


def transfer_to_human(question: str) -> str:
    """Queue for a person."""
    time.sleep(NETWORK_DELAY_S)
    return "a colleague will answer in about 4 minutes"


TOOLS: Mapping[str, Callable[[str], str]] = MappingProxyType(
    {tool.__name__: tool for tool in (get_reservation_details, search_flights, transfer_to_human)}
)


def tool_call(name: str, question: str) -> dict[str, Any]:
    """The assistant's message that calls a tool."""
    code = CODE.search(question)
    arguments = {} if code is None else {"code": code.group()}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
    }


def _row(query: str, value: str) -> tuple[Any, ...] | None:
    time.sleep(NETWORK_DELAY_S)
    database = sqlite3.connect(":memory:")
    try:
        database.executescript(SCHEMA)
        found: tuple[Any, ...] | None = database.execute(query, (value,)).fetchone()
    finally:
        database.close()
    return found
