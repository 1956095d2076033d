"""The step loop: schedule, run, commit, emit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline_engine.core.base import EngineConfig, StepOutput

if TYPE_CHECKING:
    from paceline_engine.core.engine import Engine

__all__ = ["Engine", "EngineConfig", "StepOutput"]


def __getattr__(name: str) -> Any:
    """Import the engine when it is asked for: it needs torch, which a client's process may lack."""
    if name == "Engine":
        from paceline_engine.core.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
