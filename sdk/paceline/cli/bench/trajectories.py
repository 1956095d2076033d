"""Agent conversations to replay: the excerpt that ships, or a file of the same form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from paceline_engine.errors import InvalidValueError

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTurn:
    """What the model saw when it was asked for one assistant message."""

    conversation: int
    messages: Messages


def load_turns(data: Path | None) -> list[ReplayTurn]:
    """Every assistant turn of every conversation, in order.

    Raises:
        InvalidValueError: the file cannot be read or holds no conversation.
    """
    if data is None:
        text = files("paceline").joinpath("data/airline_trajectories.jsonl").read_text(encoding="utf-8")
    else:
        text = _read(data)
    turns = list(_turns(text, source=str(data)))
    if not turns:
        raise InvalidValueError(
            "data", observed=str(data), limit="a file with assistant messages", remedy="leave --data out"
        )
    return turns


def spread(turns: list[ReplayTurn], n: int) -> list[ReplayTurn]:
    """``n`` turns (or all), evenly spread, in order."""
    if n >= len(turns):
        return turns
    return [turns[index * len(turns) // n] for index in range(n)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValueError(
            "data", observed=str(path), limit="a readable file of JSON lines", remedy=str(error)
        ) from error


def _turns(text: str, *, source: str) -> Iterator[ReplayTurn]:
    for number, line in enumerate(filter(str.strip, text.splitlines())):
        try:
            messages: Messages = json.loads(line)["messages"]
            roles = [message["role"] for message in messages]
        except (json.JSONDecodeError, KeyError, TypeError, RecursionError) as error:
            raise InvalidValueError(
                "data",
                observed=f"{source}, line {number + 1}",
                limit="a JSON object a line, whose 'messages' are objects with a 'role'",
                remedy=f"mend this: {type(error).__name__}: {error}",
            ) from error
        for index, role in enumerate(roles):
            if role == "assistant" and index:
                yield ReplayTurn(conversation=number, messages=messages[:index])
