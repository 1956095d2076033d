"""Hands items from the thread that reads the worker to a task of any event loop."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """A queue with one reader at a time, which may belong to another loop or thread at every wait.

    No locks: ``put`` appends and then looks for a waiter, ``wait`` sets the waiter and then looks for
    items, so one of the two sees the other. A waiter woken for nothing waits again.
    """

    def __init__(self) -> None:
        self.items: collections.deque[T] = collections.deque()
        self.last_put_at_s = time.monotonic()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    @property
    def is_awaited(self) -> bool:
        return self._waiter is not None

    def put(self, item: T) -> None:
        """Add an item, from any thread. Never blocks."""
        self.last_put_at_s = time.monotonic()
        self.items.append(item)
        if (waiter := self._waiter) is not None:
            loop, future = waiter
            # A loop that was closed with a stream open has nobody left to wake.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_wake, future)

    async def wait(self, until_s: float | None) -> bool:
        """Wait for an item, at most until then (monotonic). False where the time passed without one."""
        loop = asyncio.get_running_loop()
        while not self.items:
            left_s = None if until_s is None else until_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                return False
            future: asyncio.Future[None] = loop.create_future()
            alarm = None if left_s is None else loop.call_later(left_s, _wake, future)
            self._waiter = (loop, future)
            try:
                if not self.items:
                    await future
            finally:
                self._waiter = None
                if alarm is not None:
                    alarm.cancel()
        return True


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
