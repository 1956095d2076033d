"""Making a span current for the caller's own spans."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from opentelemetry import context as context_api
from opentelemetry.context import Context


class Activation:
    """Makes ``context`` current until ``end``, so that spans the caller starts nest under ours.

    A context that was entered in one task and left in another cannot be reset with the token of
    ``contextvars``; OpenTelemetry logs a traceback then. So no token is kept: ``end`` puts the context from
    before back where ours is still current, and does nothing elsewhere (another task, or code in between
    that attached a context and never detached it).
    """

    def __init__(self, context: Context) -> None:
        self._previous = context_api.get_current()
        self._own = context
        self._ended = False
        context_api.attach(context)

    def end(self) -> None:
        """Put the context from before back; later calls do nothing."""
        if self._ended:
            return
        self._ended = True
        if context_api.get_current() is self._own:
            context_api.attach(self._previous)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()


def activate(context: Context) -> Activation:
    """Make a span's ``context`` current; end it in the same task. Never hold it across a ``yield``."""
    return Activation(context)
