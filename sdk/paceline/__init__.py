"""Paceline: inference for agents that must answer in time.

    async with paceline.AsyncClient() as client:
        async with client.turn(slo=paceline.SLO(ttft_ms=200, tpot_ms=30, e2e_ms=2000)) as turn:
            async for chunk in turn.stream(messages, max_tokens=48):
                print(chunk.text, end="")
        print(turn.report)

Names are imported when they are first used, so that importing the package takes next to no time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline import errors as errors
    from paceline import testing as testing
    from paceline import tracing as tracing
    from paceline.answer import Answer as Answer
    from paceline.answer import AnswerChoice as AnswerChoice
    from paceline.answer import Choice as Choice
    from paceline.client import AsyncClient as AsyncClient
    from paceline.context import current_turn as current_turn
    from paceline.errors import DeadlineExpiredError as DeadlineExpiredError
    from paceline.errors import GenerationError as GenerationError
    from paceline.errors import InfeasibleError as InfeasibleError
    from paceline.errors import InvalidValueError as InvalidValueError
    from paceline.errors import PacelineError as PacelineError
    from paceline.report import GenerationRecord as GenerationRecord
    from paceline.report import Report as Report
    from paceline.report import Verdict as Verdict
    from paceline.stream import AsyncStream as AsyncStream
    from paceline.sync import Client as Client
    from paceline.sync import Stream as Stream
    from paceline.sync import Turn as Turn
    from paceline.turn import AsyncTurn as AsyncTurn
    from paceline_engine.chunk import Chunk as Chunk
    from paceline_engine.chunk import FinishReason as FinishReason
    from paceline_engine.chunk import Usage as Usage
    from paceline_engine.mode import Variant as Variant
    from paceline_policies.decision import Decision as Decision
    from paceline_policies.slo import SLO as SLO

_HOMES = {
    "Answer": "paceline.answer",
    "AnswerChoice": "paceline.answer",
    "AsyncClient": "paceline.client",
    "AsyncStream": "paceline.stream",
    "AsyncTurn": "paceline.turn",
    "Choice": "paceline.answer",
    "Chunk": "paceline_engine.chunk",
    "Client": "paceline.sync",
    "DeadlineExpiredError": "paceline.errors",
    "Decision": "paceline_policies.decision",
    "FinishReason": "paceline_engine.chunk",
    "GenerationError": "paceline.errors",
    "GenerationRecord": "paceline.report",
    "InfeasibleError": "paceline.errors",
    "InvalidValueError": "paceline.errors",
    "PacelineError": "paceline.errors",
    "Report": "paceline.report",
    "SLO": "paceline_policies.slo",
    "Stream": "paceline.sync",
    "Turn": "paceline.sync",
    "Usage": "paceline_engine.chunk",
    "Variant": "paceline_engine.mode",
    "Verdict": "paceline.report",
    "current_turn": "paceline.context",
}
_MODULES = ("errors", "testing", "tracing")

__all__ = sorted([*_HOMES, *_MODULES])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"paceline.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
