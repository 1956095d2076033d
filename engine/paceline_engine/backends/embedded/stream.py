"""One generation as its caller sees it: chunks, time limits, and every way of leaving."""

from __future__ import annotations

import asyncio
import copy
import os
import time
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeAlias

from paceline_engine.backends.embedded.session import Call, Item, Session
from paceline_engine.chunk import Chunk
from paceline_engine.errors import (
    BackendError,
    ClosedError,
    DeadlineExpiredError,
    GenerationError,
    PacelineError,
    StallError,
)
from paceline_engine.plan import Plan
from paceline_engine.request import GenerationRequest

Opened: TypeAlias = tuple[Session, Call]


class PendingCall:
    """One request: sent once, then awaited within the limits of its plan, and left in any way.

    Dropping it aborts the request at once, in whatever thread that happens and whether or not its event
    loop still runs; a generator could only do so through the loop that ran it.
    """

    def __init__(
        self, plan: Plan, *, open_call: Callable[[float], Awaitable[Opened]], grace_s: float
    ) -> None:
        self._plan = plan
        self._open_call = open_call
        self._grace_s = grace_s
        self._opened: Opened | None = None
        self._abandon: Callable[[], object] | None = None
        self._closed = False
        self._owner_pid = os.getpid()

    async def next_item(self) -> Item | None:
        """The next item, its errors raised; None where the call was left meanwhile.

        Raises:
            StallError, BackendError: a limit of the plan passed; the request was aborted.
            PacelineError: what the engine or the worker's end reported.
        """
        try:
            item = await self._wait()
        except BaseException:
            # A cancelled task, or a limit that passed: either way nobody will read on.
            self.leave()
            raise
        if isinstance(item, PacelineError):
            self.leave()
            raise self._own(item)
        return item

    def leave(self) -> None:
        """Abort the request unless it has ended. Calling it again does nothing."""
        self._closed = True
        if self._abandon is not None:
            self._abandon()

    async def _wait(self) -> Item | None:
        if self._opened is None:
            await self._open()
        assert self._opened is not None
        inbox = self._opened[1].inbox
        if inbox.items:
            # A reader that is slower than the engine never waits: its loop must run on all the same, and a
            # cancellation reach it.
            await asyncio.sleep(0)
        while not inbox.items and not self._closed:
            until_s, give_up = self._limit(inbox.last_put_at_s)
            if not await inbox.wait(until_s):
                raise give_up()
        return None if self._closed else inbox.items.popleft()

    async def _open(self) -> None:
        submitted_at_s = time.monotonic()
        refuse_expired(self._plan, submitted_at_s)
        # The worker may have to be started first: the plan's limits hold for that wait too.
        until_s, give_up = self._limit(submitted_at_s)
        try:
            async with asyncio.timeout(None if until_s is None else until_s - submitted_at_s):
                session, call = await self._open_call(submitted_at_s)
        except TimeoutError:
            raise give_up() from None
        self._opened = session, call
        finalizer = weakref.finalize(self, session.abandon, call)
        # At interpreter exit the worker ends anyway.
        finalizer.atexit = False
        self._abandon = finalizer
        if self._closed:
            finalizer()

    def _limit(self, last_put_at_s: float) -> tuple[float | None, Callable[[], PacelineError]]:
        """Until when to wait for the next item, and the error for then."""
        plan = self._plan
        limits: list[tuple[float, Callable[[], PacelineError]]] = []
        if plan.stall_limit_s is not None:
            limits.append((last_put_at_s + plan.stall_limit_s, self._stalled))
        if plan.hard_deadline and plan.deadline_at_s is not None:
            limits.append((plan.deadline_at_s + self._grace_s, self._overdue))
        return min(limits, key=lambda limit: limit[0]) if limits else (None, self._stalled)

    def _stalled(self) -> PacelineError:
        limit_s = self._plan.stall_limit_s or 0.0
        where = "since the last token" if self.phase == "decode" else "before the first token"
        return StallError(
            f"nothing came from the engine for {limit_s:.3g} s {where}, the stall limit of the plan: "
            "the request was aborted; raise the limit if the prompt or the machine needs longer",
            partial_text=self.partial_text,
            phase=self.phase,
        )

    def _overdue(self) -> PacelineError:
        return BackendError(
            f"the engine had not ended the generation {self._grace_s:.3g} s after its hard deadline: "
            "the request was aborted; its step loop is stuck or its steps are longer than that",
            partial_text=self.partial_text,
            phase=self.phase,
        )

    def _own(self, error: PacelineError) -> PacelineError:
        """A copy for this caller: the one error of a dead worker goes to everyone who waits."""
        mine = copy.copy(error)
        mine.__cause__ = error.__cause__
        if isinstance(mine, GenerationError):
            mine.partial_text = mine.partial_text or self.partial_text
            mine.phase = mine.phase or self.phase
        return mine

    @property
    def partial_text(self) -> str:
        return ""

    @property
    def phase(self) -> str:
        """``queue`` until the request is sent, ``prefill`` until its first token, then ``decode``."""
        return "queue" if self._opened is None else "prefill"


class EmbeddedStream(PendingCall):
    """An async iterator of one generation's chunks. The first ``__anext__`` sends the request."""

    def __init__(
        self,
        request: GenerationRequest,
        plan: Plan,
        *,
        open_call: Callable[[float], Awaitable[Opened]],
        grace_s: float,
    ) -> None:
        super().__init__(plan, open_call=open_call, grace_s=grace_s)
        self._texts = [""] * request.n
        self._unfinished = set(range(request.n))
        self._has_tokens = False
        self._busy = False

    def __aiter__(self) -> EmbeddedStream:
        return self

    async def __anext__(self) -> Chunk:
        check_owner(self._owner_pid)
        if self._busy:
            raise RuntimeError("this stream is already being read by another task")
        if self._closed or not self._unfinished:
            raise StopAsyncIteration
        self._busy = True
        try:
            chunk = await self.next_item()
        finally:
            self._busy = False
        if chunk is None:
            raise StopAsyncIteration
        assert isinstance(chunk, Chunk)
        self._texts[chunk.index] += chunk.text
        self._has_tokens = self._has_tokens or bool(chunk.token_ids or chunk.text)
        if chunk.finish is not None:
            self._unfinished.discard(chunk.index)
        return replace(chunk, delivered_at_s=time.monotonic())

    async def aclose(self) -> None:
        """Abort the request unless it has ended; a task that waits for a chunk sees the stream end."""
        self.leave()
        if self._opened is not None and self._busy:
            self._opened[1].inbox.put(ClosedError("the stream was closed"))

    @property
    def partial_text(self) -> str:
        """The text so far of the first choice that has not ended."""
        return self._texts[min(self._unfinished, default=0)]

    @property
    def phase(self) -> str:
        return "decode" if self._has_tokens else super().phase


def refuse_expired(plan: Plan, now_s: float) -> None:
    """Raises ``DeadlineExpiredError`` where the plan's deadline has passed: such work is never sent."""
    if plan.deadline_at_s is not None and plan.deadline_at_s <= now_s:
        raise DeadlineExpiredError(late_ms=(now_s - plan.deadline_at_s) * 1e3)


def check_owner(owner_pid: int) -> None:
    """Raises ``ClosedError`` in a process that was forked after the backend was made."""
    if os.getpid() != owner_pid:
        raise ClosedError(
            "this backend belongs to the parent process, whose worker it drives: "
            "create a client after the fork"
        )
