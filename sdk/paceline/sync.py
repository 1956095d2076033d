"""The same without ``async``: a thin face over the async client, whose loop runs in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack

from paceline.answer import Answer, Choice
from paceline.calibrate import ProfileOption
from paceline.client import DEFAULT_MODEL, AsyncClient
from paceline.context import current_turn, enter_turn, leave_turn
from paceline.ledger import Clock
from paceline.options import GenerateOptions
from paceline.policy import Policy
from paceline.report import Report
from paceline.stream import AsyncStream
from paceline.turn import AsyncTurn, Messages, ToolCall, Tools
from paceline_engine.backends.base import Backend, ModelInfo, OnProgress
from paceline_engine.chunk import Chunk, Usage
from paceline_engine.errors import ClosedError
from paceline_engine.mode import Variant
from paceline_policies.decision import Decision
from paceline_policies.profile import Profile
from paceline_policies.slo import SLO

if TYPE_CHECKING:
    from paceline.tracing.context import Activation

T = TypeVar("T")


class _Loop:
    """An event loop in a daemon thread, started with the first call."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        # Reentrant: collecting garbage inside it may close this very loop.
        self._lock = threading.RLock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it there in a copy of the caller's context, and wait."""
        try:
            if not self.owned:
                raise ClosedError("this client belongs to the parent process: make one after the fork")
            with self._lock:
                future = asyncio.run_coroutine_threadsafe(work, self._running())
        except BaseException:
            work.close()
            raise
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise ClosedError("the client was closed while this ran") from None
        except BaseException:
            future.cancel()  # Nothing where it ended; else the caller was interrupted (Ctrl-C).
            raise

    @property
    def owned(self) -> bool:
        """Whether this process started it; a forked child has neither its thread nor its lock's state."""
        return os.getpid() == self._pid

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._closed:
            raise ClosedError("the client is closed: make a new one")
        if self._thread is threading.current_thread():
            raise ClosedError("a sync call from the client's own loop would wait for itself: use AsyncClient")
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=_run_loop, args=(self._loop,), name="paceline-client", daemon=True
            )
            self._thread.start()
        return self._loop

    def close(self) -> None:
        if not self.owned:
            return
        with self._lock:
            self._closed = True
            loop, thread = self._loop, self._thread
            self._loop = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            if thread is not threading.current_thread():
                thread.join()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        # Whoever still waits for something in another thread has to be told.
        if left := asyncio.all_tasks(loop):
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()


class Client:
    """``AsyncClient`` without ``async``; for several threads, and inside a running event loop too."""

    def __init__(
        self,
        model: str | os.PathLike[str] = DEFAULT_MODEL,
        *,
        backend: Backend | Sequence[Backend] | None = None,
        slo: SLO | None = None,
        profile: ProfileOption | Profile = "auto",
        on_progress: OnProgress | None = None,
        device: str | None = None,
        variants: Sequence[Variant | str] | None = None,
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        kv_tokens: int | None = None,
        n_threads: int | None = None,
        host: Literal["process", "thread"] = "process",
        tracing: bool = True,
        clock: Clock = time.monotonic,
        policy: Policy | None = None,
    ) -> None:
        """Arguments as ``AsyncClient``."""
        self._client = AsyncClient(
            model,
            backend=backend,
            slo=slo,
            profile=profile,
            on_progress=on_progress,
            device=device,
            variants=variants,
            adapters=adapters,
            kv_tokens=kv_tokens,
            n_threads=n_threads,
            host=host,
            tracing=tracing,
            clock=clock,
            policy=policy,
        )
        self._loop = _Loop()
        # A client that is never closed must not keep its thread for the life of the process.
        self._finalizer = weakref.finalize(self, self._loop.close)
        self._finalizer.atexit = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Client {self._client._label()}>"

    @property
    def slo(self) -> SLO:
        """What turns get that name none."""
        return self._client.slo

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called; a closed client opens no turns."""
        return self._client.closed

    @property
    def models(self) -> Mapping[str, ModelInfo]:
        """What each backend serves, by the backend's name; empty before the start."""
        return self._client.models

    def start(self) -> None:
        """Load the model, and calibrate where no profile is saved. Errors as ``AsyncClient.start``."""
        self._client._check_usable()
        self._loop.call(self._client.start())

    def close(self) -> None:
        """Save what was learned, end all that runs and close the backends; again does nothing."""
        if self._loop.owned and not self._client.closed:
            try:
                self._loop.call(self._client.aclose())
            finally:
                self._finalizer()

    def turn(self, name: str = "agent", *, slo: SLO | None = None) -> Turn:
        """A turn, to be opened with ``with``; its budgets count from there. As ``AsyncClient.turn``."""
        return Turn(self._client.turn(name, slo=slo), self._loop)

    def warm(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        salt: str = "",
        adapter: str | None = None,
        pin_s: float | None = None,
    ) -> Usage:
        """Prefill a prefix into the prefix cache ahead of any turn. As ``AsyncClient.warm``."""
        self._client._check_usable()
        return self._loop.call(
            self._client.warm(messages, tools=tools, salt=salt, adapter=adapter, pin_s=pin_s)
        )

    def end_session(self, session: str, *, salt: str = "") -> None:
        """Forget what was said in a session. As ``AsyncClient.end_session``."""
        self._client.end_session(session, salt=salt)


class Turn:
    """``AsyncTurn`` without ``async``."""

    def __init__(self, turn: AsyncTurn, loop: _Loop) -> None:
        self._turn = turn
        self._loop = loop
        self._outer: AsyncTurn | Turn | None = None
        self._activation: Activation | None = None

    def __enter__(self) -> Self:
        self._loop.call(self._turn._enter())
        self._outer = current_turn()
        enter_turn(self)
        self._activation = self._turn._activate()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._loop.owned:
                self._loop.call(self._turn._exit(error))
        finally:
            if self._activation is not None:
                self._activation.end()
            leave_turn(self)

    def close(self) -> None:
        """Close a turn that was entered by hand; calling it again does nothing."""
        if not self._turn.closed and self._turn._desk is not None:
            self.__exit__(None, None, None)

    def __repr__(self) -> str:
        return f"<Turn {self._turn._label()}>"

    @property
    def async_turn(self) -> AsyncTurn:
        """The turn underneath, for async code that runs inside this turn."""
        return self._turn

    @property
    def name(self) -> str:
        return self._turn.name

    @property
    def slo(self) -> SLO:
        return self._turn.slo

    @property
    def closed(self) -> bool:
        return self._turn.closed

    @property
    def outer(self) -> AsyncTurn | Turn | None:
        """The turn in which this one was opened."""
        return self._outer

    @property
    def trace_id(self) -> str | None:
        return self._turn.trace_id

    @property
    def deadline_at_s(self) -> float | None:
        """When the turn should have ended, in seconds on the client's clock; None without an E2E budget."""
        return self._turn.deadline_at_s

    def remaining_ms(self) -> float | None:
        """Milliseconds left of the E2E budget; negative once it has passed, None without one."""
        return self._turn.remaining_ms()

    @property
    def report(self) -> Report:
        """The turn as it went; while it is open, as far as it came."""
        return self._turn.report

    def stream(
        self,
        messages: Messages,
        *,
        max_tokens: int | None = None,
        tools: Tools | None = None,
        slo: SLO | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """A generation as a stream of chunks. Arguments and errors as ``AsyncTurn.stream``."""
        stream = self._turn.stream(messages, max_tokens=max_tokens, tools=tools, slo=slo, **options)
        return Stream(stream, self._loop)

    def generate(
        self,
        messages: Messages,
        *,
        max_tokens: int | None = None,
        tools: Tools | None = None,
        slo: SLO | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Answer:
        """The whole answer of a generation. Arguments and errors as ``AsyncTurn.stream``."""
        return self._loop.call(
            self._turn.generate(messages, max_tokens=max_tokens, tools=tools, slo=slo, **options)
        )

    def choose(
        self,
        messages: Messages,
        *,
        options: Sequence[str],
        tools: Tools | None = None,
        slo: SLO | None = None,
        salt: str = "",
        adapter: str | None = None,
    ) -> Choice:
        """The likeliest of ``options``, scored without decoding. As ``AsyncTurn.choose``."""
        return self._loop.call(
            self._turn.choose(messages, options=options, tools=tools, slo=slo, salt=salt, adapter=adapter)
        )

    def plan(
        self,
        messages: Messages,
        *,
        max_tokens: int | None = None,
        tools: Tools | None = None,
        slo: SLO | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Decision:
        """What ``generate`` would do now; runs nothing. As ``AsyncTurn.plan``."""
        return self._loop.call(
            self._turn.plan(messages, max_tokens=max_tokens, tools=tools, slo=slo, **options)
        )

    def tool(self, name: str, *, attributes: Mapping[str, Any] | None = None, pin: bool = True) -> ToolCall:
        """Time a tool's run as part of the turn: ``with turn.tool("lookup"):``. See ``AsyncTurn.tool``."""
        return self._turn.tool(name, attributes=attributes, pin=pin)


class Stream:
    """``AsyncStream`` without ``async``."""

    def __init__(self, stream: AsyncStream, loop: _Loop) -> None:
        self._stream = stream
        self._loop = loop

    def __iter__(self) -> Self:
        return self

    def __repr__(self) -> str:
        return f"<Stream {self._stream._label()}>"

    def __next__(self) -> Chunk:
        chunk = self._loop.call(_next(self._stream))
        if chunk is None:
            raise StopIteration
        return chunk

    def change_variant(self, variant: Variant | str) -> None:
        """See ``AsyncStream.change_variant``."""
        self._loop.call(self._stream.change_variant(variant))

    def close(self) -> None:
        """Cancel the generation, where it still runs; calling it again does nothing."""
        if self._loop.owned:
            self._loop.call(self._stream.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def text(self) -> str:
        """Of the first choice, so far."""
        return self._stream.text

    @property
    def decision(self) -> Decision | None:
        return self._stream.decision

    @property
    def finish_reason(self) -> str | None:
        return self._stream.finish_reason

    @property
    def usage(self) -> Usage | None:
        return self._stream.usage

    def answer(self) -> Answer:
        """Take what is left and give the whole answer."""
        return self._loop.call(self._stream.answer())


async def _next(stream: AsyncStream) -> Chunk | None:
    """None at the end: StopIteration cannot pass through a future."""
    try:
        return await anext(stream)
    except StopAsyncIteration:
        return None
