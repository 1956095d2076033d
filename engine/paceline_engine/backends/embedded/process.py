"""Runs the worker as a child process and carries frames to and from it."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import IO

from paceline_engine.backends.embedded.messages import (
    Close,
    Command,
    Connection,
    Event,
    Launch,
    Lost,
    encode,
)

logger = logging.getLogger("paceline.engine.worker")

_LINES_KEPT = 40
_LONGEST_LINE = 4096
_WORKER = "paceline_engine.backends.embedded.worker"


class ProcessTransport:
    """One worker process, from its start to its end.

    Three threads sleep in the kernel beside it: one starts the process and reads what it sends (the
    kernel ties the worker's life to that very thread), one writes, one keeps what it prints.
    """

    def __init__(self, launch: Launch, *, on_event: Callable[[Event], None]) -> None:
        self._launch = launch
        self._on_event = on_event
        # SimpleQueue.put is reentrant: a stream may be dropped, and so aborted, inside any call.
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lines: collections.deque[str] = collections.deque(maxlen=_LINES_KEPT)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._killed = False
        self._owner_pid = os.getpid()
        self.ended = threading.Event()
        _forget_in_forked_children(self)

    @property
    def pid(self) -> int | None:
        """Of the worker, once it was started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process; the events begin with ``Loading``, ``Ready`` or ``StartFailed``."""
        threading.Thread(target=self._run, name="paceline-worker-reader", daemon=True).start()

    def send(self, command: Command) -> None:
        """Queue a command. Never blocks; may be called from a finalizer.

        It is pickled here, so that the caller learns of what cannot be, and not the writing thread.
        """
        self._outbox.put(encode(command))

    def close(self) -> None:
        """Ask the worker to end."""
        self._outbox.put(encode(Close()))

    def kill(self) -> None:
        """End the worker at once. May be called from a finalizer and at interpreter exit."""
        self._killed = True
        process = self._process
        if process is not None and os.getpid() == self._owner_pid:
            with contextlib.suppress(OSError):
                process.kill()

    def _run(self) -> None:
        reason = "its connection was lost"
        try:
            process, connection = self._spawn()
        except Exception as error:
            self.ended.set()
            self._on_event(Lost(reason=f"it could not be started: {type(error).__name__}: {error}"))
            return
        output = process.stdout
        assert output is not None
        keeper = threading.Thread(target=self._keep_lines, args=(output,), name="paceline-worker-output")
        keeper.daemon = True
        keeper.start()
        writer = threading.Thread(target=self._write, args=(connection,), name="paceline-worker-writer")
        writer.daemon = True
        writer.start()
        try:
            while (event := connection.receive()) is not None:
                self._on_event(event)
        except Exception as error:
            reason = f"it sent what could not be read: {type(error).__name__}: {error}"
        self._end(process, connection, keeper, writer, reason)

    def _spawn(self) -> tuple[subprocess.Popen[bytes], Connection]:
        if not sys.executable or os.name != "posix":
            raise RuntimeError("no worker can be started from this Python or system: use host='thread'")
        launch = encode(self._launch)
        ours, theirs = socket.socketpair()
        try:
            process = subprocess.Popen(
                # -P: what lies in the working directory must not shadow what the worker imports.
                [sys.executable, "-P", "-m", _WORKER, str(theirs.fileno()), str(self._owner_pid)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                pass_fds=(theirs.fileno(),),
                env=_environment(self._launch.config.threads),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._process, self._connection = process, Connection(ours)
        if self._killed:
            process.kill()
        with contextlib.suppress(OSError):
            self._connection.send_frame(launch)
        return process, self._connection

    def _write(self, connection: Connection) -> None:
        while (frame := self._outbox.get()) is not None:
            try:
                connection.send_frame(frame)
            except OSError:
                # The reader sees the end too, and tells everyone.
                return

    def _keep_lines(self, output: IO[bytes]) -> None:
        with output:
            rest = b""
            while received := output.read(1 << 16):
                *lines, rest = (rest + received).split(b"\n")
                for line in [*lines, rest[:_LONGEST_LINE]] if len(rest) > _LONGEST_LINE else lines:
                    self._keep(line)
                rest = b"" if len(rest) > _LONGEST_LINE else rest
            self._keep(rest)

    def _keep(self, line: bytes) -> None:
        if text := line.decode("utf-8", "replace").rstrip():
            self._lines.append(text)
            logger.debug("%s", text)

    def _end(
        self,
        process: subprocess.Popen[bytes],
        connection: Connection,
        keeper: threading.Thread,
        writer: threading.Thread,
        reason: str,
    ) -> None:
        """Reap the process, free the descriptors and report."""
        self._outbox.put(None)
        try:
            status: int | None = process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        writer.join(timeout=1.0)
        # A grandchild could hold the pipe open: what it prints later is of no interest.
        keeper.join(timeout=0.5)
        connection.close()
        self.ended.set()
        self._on_event(Lost(reason=_describe(status, reason), details="\n".join(list(self._lines)[-12:])))

    def _forget(self) -> None:
        """In a forked child: drop the copies of the descriptors, and leave the process alone."""
        if self._process is not None:
            self._process.returncode = 0
            if self._process.stdout is not None:
                self._process.stdout.close()
        if self._connection is not None:
            self._connection.close()


def _forget_in_forked_children(transport: ProcessTransport) -> None:
    if not hasattr(os, "register_at_fork"):
        return
    reference = weakref.ref(transport)

    def forget() -> None:
        alive = reference()
        if alive is not None:
            alive._forget()

    os.register_at_fork(after_in_child=forget)


def _environment(n_threads: int) -> dict[str, str]:
    """Ours, with our import path and the thread counts that libraries read when they are loaded."""
    threads = str(n_threads)
    # A thread that spins at the end of an operator takes the core from the one that it waits for, as soon
    # as anything else runs here.
    waiting = os.environ.get("OMP_WAIT_POLICY", "passive")
    paths = [path or os.getcwd() for path in sys.path]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": waiting,
    }


def _describe(status: int | None, reason: str) -> str:
    if status is None or status == 0:
        return reason
    if status > 0:
        return f"it ended with exit status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
    hint = " (often the kernel, out of memory)" if name == "SIGKILL" else ""
    return f"it was killed by {name}{hint}"
