"""Spans that record nothing, for clients with ``tracing=False``."""

from __future__ import annotations

from typing import Any

from opentelemetry.context import Context


class UntracedSpan:
    """Implements ``ChatSpan`` and ``ToolSpan``."""

    @property
    def context(self) -> Context:
        from opentelemetry.context import get_current

        return get_current()

    def decided(self, *_: Any, **__: Any) -> None: ...

    def end(self, *_: Any, **__: Any) -> None: ...


class UntracedTurn:
    """Implements ``TurnSpan``."""

    trace_id: str | None = None

    @property
    def context(self) -> Context:
        from opentelemetry.context import get_current

        return get_current()

    def start_chat(self, *_: Any, **__: Any) -> UntracedSpan:
        return UntracedSpan()

    def start_tool(self, *_: Any, **__: Any) -> UntracedSpan:
        return UntracedSpan()

    def end(self, *_: Any, **__: Any) -> None: ...
