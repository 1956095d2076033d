"""Runs the step loop on threads of this process, behind the same interface as the worker process."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

from paceline_engine.backends.embedded.loop import EngineLoop
from paceline_engine.backends.embedded.messages import Close, Command, Event, Launch, Lost, Ready, StartFailed
from paceline_engine.backends.embedded.worker import open_loop, start_error


class ThreadTransport:
    """One step loop on a thread, and one thread that hands it commands.

    ``n_threads`` sets torch's thread count for the whole process. A running step cannot be killed:
    closing waits for it, at most as long as the backend's ``close_timeout_s``.
    """

    def __init__(self, launch: Launch, *, on_event: Callable[[Event], None]) -> None:
        self._launch = launch
        self._on_event = on_event
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.ended = threading.Event()

    @property
    def pid(self) -> int | None:
        return os.getpid()

    def start(self) -> None:
        threading.Thread(target=self._run, name="paceline-steps", daemon=True).start()

    def send(self, command: Command) -> None:
        """Queue a command. Never blocks; may be called from a finalizer."""
        self._inbox.put(command)

    def close(self) -> None:
        self._inbox.put(Close())

    def kill(self) -> None:
        self.close()

    def _run(self) -> None:
        try:
            loop, info = open_loop(self._launch, self._on_event)
        except Exception as error:
            self._on_event(StartFailed(error=start_error(error, self._launch.config.model)))
            self.ended.set()
            self._on_event(Lost(reason="it could not load the model"))
            return
        threading.Thread(target=self._serve, args=(loop,), name="paceline-commands", daemon=True).start()
        self._on_event(Ready(info=info))
        loop.run()
        self._inbox.put(Close())
        self.ended.set()
        self._on_event(Lost(reason="its step loop ended"))

    def _serve(self, loop: EngineLoop) -> None:
        closing = False
        while not closing:
            command = self._inbox.get()
            closing = isinstance(command, Close)
            loop.handle(command)
