"""The chunks of one generation, as the caller takes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self, cast

from paceline.answer import Answer
from paceline.call import Call, Desk, Wanted, decide
from paceline_engine.backends.base import VariantChanging
from paceline_engine.chunk import Chunk, FinishReason, Usage
from paceline_engine.errors import (
    BackendError,
    ClosedError,
    DeadlineExpiredError,
    GenerationError,
    InvalidValueError,
    UnknownOptionError,
)
from paceline_engine.mode import Variant
from paceline_engine.request import GenerationRequest
from paceline_policies.decision import Decision


class AsyncStream:
    """Iterate it for chunks; the generation begins with the first.

    Leaving early in any way (``break``, an error in the loop, cancellation, ``aclose``, dropping the
    stream, closing its turn) cancels the generation, and its record keeps what it used so far.
    """

    def __init__(self, desk: Desk, wanted: Wanted) -> None:
        self._desk = desk
        self._wanted = wanted
        self._call: Call | None = None
        self._source: AsyncIterator[Chunk] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._puller: asyncio.Task[Any] | None = None
        self._closed: str | None = None
        """Why nothing more can be taken; None while the stream is open or read to its end."""
        self._done = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if self._done:
            raise StopAsyncIteration
        if self._closed is not None:
            raise ClosedError(self._closed)
        if self._puller is not None:
            raise ClosedError("this stream is being read by another task: read it from one task at a time")
        self._puller = asyncio.current_task()
        try:
            return await self._next()
        except BaseException as error:
            closed_under_reader = self._closed
            await self._fail(error)
            if closed_under_reader is not None and isinstance(error, asyncio.CancelledError):
                # Another task closed the stream or its turn: an error here, not this task's cancellation.
                if self._puller is not None:
                    self._puller.uncancel()
                raise ClosedError(closed_under_reader) from None
            raise
        finally:
            self._puller = None

    async def _next(self) -> Chunk:
        if self._source is None:
            await self._begin()
        call, source = self._call, self._source
        assert call is not None
        assert source is not None
        assert call.collector is not None
        while True:
            try:
                chunk = await anext(source)
            except DeadlineExpiredError:
                plan = call.without_deadline() if call.collector.empty else None
                if plan is None:
                    raise
                source = self._source = call.decided.served.backend.submit(
                    cast("GenerationRequest", call.request), plan
                )
                continue
            except StopAsyncIteration:
                raise BackendError(
                    "the backend ended its stream without saying how the generation ended",
                    partial_text=call.collector.text,
                ) from None
            taken = call.collector.take(chunk)
            if call.collector.complete:
                await self._finish(call)
            if taken is not None:
                return taken

    async def _begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        decided = await decide(self._desk, self._wanted)
        self._call = Call(self._desk, self._wanted, decided)
        plan = self._call.ready()
        self._source = decided.served.backend.submit(cast("GenerationRequest", self._call.request), plan)

    async def _finish(self, call: Call) -> None:
        assert call.collector is not None
        self._done = True
        call.end(finish_reason=call.collector.finish_reason)
        await _close(self._source)

    async def _fail(self, error: BaseException) -> None:
        """Record how the generation ended badly, and free the backend."""
        call = self._call
        if call is not None and not call.ended:
            if isinstance(error, Exception):
                if isinstance(error, GenerationError) and not error.partial_text and call.collector:
                    error.partial_text = call.collector.text
                call.end(error=error)
            else:
                call.end(finish_reason=FinishReason.CANCELLED)
        if self._closed is None:
            self._closed = f"this stream ended with {type(error).__name__}: start a new one"
        await _close(self._source)

    async def aclose(self) -> None:
        """Cancel the generation, where it still runs; calling it again does nothing."""
        await self._close("this stream was closed before its end: start a new one")

    async def _close(self, why: str) -> None:
        if self._done:
            return
        if self._closed is None:
            self._closed = why
        if self._call is not None:
            self._call.end(finish_reason=FinishReason.CANCELLED)
        puller, loop, source = self._puller, self._loop, self._source
        if puller is not None and puller is not asyncio.current_task():
            assert loop is not None
            if not loop.is_closed():
                loop.call_soon_threadsafe(puller.cancel)
        elif source is not None:
            self._source = None
            await _close_on(loop, source)

    def __del__(self) -> None:
        if self._done or self._call is None or self._call.ended:
            return
        self._call.end(finish_reason=FinishReason.CANCELLED)
        loop, source = self._loop, self._source
        if source is not None and loop is not None and loop.is_running():
            # Dropping the source would do; closing it by name does not wait for the garbage collector.
            loop.call_soon_threadsafe(_spawn_close, source, self._desk.closing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._label()}>"

    def _label(self) -> str:
        if self._call is None:
            return "not begun" if self._closed is None else "closed"
        state = "ended" if self._done else "running" if self._closed is None else "closed"
        return f"{state}, {len(self.text)} characters"

    @property
    def text(self) -> str:
        """Of the first choice, so far."""
        return "" if self._call is None or self._call.collector is None else self._call.collector.text

    @property
    def decision(self) -> Decision | None:
        """None before the first chunk was asked for."""
        return None if self._call is None else self._call.decided.decision

    @property
    def finish_reason(self) -> str | None:
        """None while it runs and where it failed."""
        record = None if self._call is None else self._call.record
        return None if record is None else record.finish_reason

    @property
    def usage(self) -> Usage | None:
        """None while it runs."""
        record = None if self._call is None else self._call.record
        return None if record is None else record.usage

    async def change_variant(self, variant: Variant | str) -> None:
        """Run the rest of the generation as ``variant``, from its next token on.

        The step policy leaves it there, whatever the budgets say. Nothing happens where it has ended.

        Raises:
            InvalidValueError: it has not begun, or its backend cannot change variants.
            UnknownOptionError: a variant that the backend does not serve.
        """
        call = self._call
        if call is None or self._source is None:
            if self._done or self._closed is not None:
                return
            raise InvalidValueError(
                "variant",
                observed=str(variant),
                limit="changed once the stream has begun",
                remedy="take the first chunk before, or give the client only the variants that may run",
            )
        if call.ended:
            return
        served = call.decided.served
        if variant not in served.info.variants:
            raise UnknownOptionError(
                "variant",
                observed=str(variant),
                limit=f"one of {', '.join(served.info.variants)}",
                remedy="choose a variant that the backend serves",
            )
        if not isinstance(served.backend, VariantChanging):
            raise InvalidValueError(
                "variant",
                observed=str(variant),
                limit=f"fixed: backend '{served.backend.name}' cannot move a stream that runs",
                remedy="use the embedded engine, or start a new stream",
            )
        served.backend.change_variant(call.id, Variant(variant))

    async def answer(self) -> Answer:
        """Take what is left and give the whole answer."""
        async for _ in self:
            pass
        assert self._call is not None
        assert self._call.collector is not None
        assert self._call.record is not None
        return Answer(
            choices=self._call.collector.answers(self._call.wanted.options.parse),
            usage=self._call.record.usage,
            decision=self._call.decided.decision,
            timeline=self._call.record.timeline,
        )


async def _close(source: AsyncIterator[Chunk] | None) -> None:
    close = getattr(source, "aclose", None)
    if close is not None:
        await close()


async def _close_on(loop: asyncio.AbstractEventLoop | None, source: AsyncIterator[Chunk]) -> None:
    """Close a source on the loop that it belongs to."""
    if loop is None or loop is asyncio.get_running_loop():
        await _close(source)
    elif loop.is_running():
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_close(source), loop))


def _spawn_close(source: AsyncIterator[Chunk], closing: set[asyncio.Task[None]]) -> None:
    task = asyncio.ensure_future(_close(source))
    closing.add(task)
    task.add_done_callback(closing.discard)
