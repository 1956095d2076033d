"""Keeps one worker: starts it on the first call, and another when it has died, within limits."""

from __future__ import annotations

import collections
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline_engine.backends.embedded.config import EmbeddedConfig
from paceline_engine.backends.embedded.session import Session
from paceline_engine.errors import ClosedError, EngineDiedError

_WINDOW_S = 60.0


class Supervisor:
    """Owns the current session. Any thread may call it."""

    def __init__(self, config: EmbeddedConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._current: Session | None = None
        self._counted: Session | None = None
        self._deaths: collections.deque[float] = collections.deque()
        self._numbers: Mapping[str, Any] = config.step_policy_numbers
        self._closed = False
        self._owner_pid = os.getpid()

    @property
    def current(self) -> Session | None:
        return self._current

    def session(self) -> Session:
        """The session to use now: the current one, or a new one where there is none or it has ended.

        Raises:
            ClosedError: the backend was closed.
            EngineDiedError: too many workers died within a minute.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the backend is closed: create another")
            if self._current is None or self._current.lost is not None:
                self._check_deaths()
                self._current = Session(self._config, step_policy_numbers=self._numbers)
                self._current.transport.start()
            return self._current

    def renew(self, numbers: Mapping[str, Any]) -> Session | None:
        """Keep the step policy's numbers for workers to come; gives the session that is to get them now."""
        with self._lock:
            self._numbers = dict(numbers)
            return self._current

    def keep_adapter(self, name: str, path: str | None) -> None:
        """Serve an adapter from the start in workers to come; with no path, no more."""
        with self._lock:
            adapters = {**self._config.adapters, name: path}
            kept = {each: folder for each, folder in adapters.items() if folder is not None}
            self._config = replace(self._config, adapters=kept)

    def close(self) -> Session | None:
        """Start no more sessions; gives the last one."""
        with self._lock:
            self._closed = True
            return self._current

    def kill(self) -> None:
        """End the worker at once. For finalizers: takes no lock, and does nothing in a forked child."""
        self._closed = True
        if self._current is not None and os.getpid() == self._owner_pid:
            self._current.transport.kill()

    def _check_deaths(self) -> None:
        last = self._current
        if last is None or not isinstance(last.lost, EngineDiedError):
            return
        now_s = time.monotonic()
        if last is not self._counted:
            self._counted = last
            self._deaths.append(now_s)
        while self._deaths and self._deaths[0] < now_s - _WINDOW_S:
            self._deaths.popleft()
        limit = self._config.max_restarts_per_minute
        if len(self._deaths) > limit:
            raise EngineDiedError(
                f"the worker died {len(self._deaths)} times within a minute and is started again at most "
                f"{limit} times (max_restarts_per_minute): wait, or mend what ended it. Last: {last.lost}"
            )
