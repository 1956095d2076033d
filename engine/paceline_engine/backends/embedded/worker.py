"""The worker process: ``python -m paceline_engine.backends.embedded.worker SOCKET_FD PARENT_PID``.

Threads: the main one loads and steps; one blocks on the socket and carries out commands; one watches the
parent. The latter two sleep in the kernel, so that they never contend with a step for the interpreter.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable

from paceline_engine.backends.base import ModelInfo, Progress
from paceline_engine.backends.embedded.loop import EngineLoop, load_policy
from paceline_engine.backends.embedded.messages import (
    Close,
    Connection,
    Event,
    Launch,
    Loading,
    Ready,
    StartFailed,
    portable,
)
from paceline_engine.errors import BackendError, ModelLoadError, PacelineError

_WATCH_INTERVAL_S = 0.2
_PR_SET_PDEATHSIG = 1
_LOADING_THRESHOLD = 200_000
"""Objects made between two collections, until the engine is ready."""

_SWITCH_INTERVAL_S = 2e-4


def main() -> None:
    sock, parent_pid = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    die_with_parent(parent_pid)
    # Ctrl-C reaches the whole process group; whether to end is the client's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    connection = Connection(sock)
    launch = connection.receive()
    if not isinstance(launch, Launch):
        os._exit(0)

    def emit(event: Event) -> None:
        try:
            connection.send(event)
        except OSError:
            os._exit(0)

    # Loading makes a million objects that stay. Going through them at the usual rate would take a fifth of
    # the start.
    usual = gc.get_threshold()
    gc.set_threshold(_LOADING_THRESHOLD)
    commands = Commands(connection)
    threading.Thread(target=commands.serve, name="paceline-commands", daemon=True).start()
    try:
        loop, info = open_loop(launch, emit)
    except BaseException as error:
        traceback.print_exc()
        emit(StartFailed(error=start_error(error, launch.config.model)))
        os._exit(1)
    # A grammar is compiled beside the steps, which must not wait the usual 5 ms for the interpreter at each
    # of their operators.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # What loading made lives as long as the process: keep collections between steps short.
    gc.freeze()
    gc.set_threshold(*usual)
    commands.attach(loop)
    emit(Ready(info=info))
    loop.run()
    # Nothing here needs flushing, and tearing torch down takes longer than a client should wait.
    os._exit(0)


def open_loop(launch: Launch, emit: Callable[[Event], None]) -> tuple[EngineLoop, ModelInfo]:
    """Load the model; the loop is yet to be run."""
    config = launch.config
    policy = load_policy(config.step_policy, launch.step_policy_numbers)
    source = importlib.import_module(config.source)

    def report(progress: Progress) -> None:
        emit(Loading(progress=progress))

    opened = source.open_engine(config, step_policy=policy, on_progress=report)
    loop = EngineLoop(opened.engine, emit=emit, policy=policy, when_idle=opened.when_idle)
    return loop, opened.info


def start_error(error: BaseException, model: str) -> PacelineError:
    """What the client's ``start`` raises."""
    found = portable(error)
    if not isinstance(error, PacelineError) or type(found) is BackendError:
        return ModelLoadError(
            model, reason=f"loading failed with {type(error).__name__}: {error}", remedy="see the cause named"
        )
    return found


class Commands:
    """Reads the socket. Before there is a loop only ``Close`` and the end of the socket matter."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._loop: EngineLoop | None = None
        self._attached = threading.Event()

    def attach(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._attached.set()

    def serve(self) -> None:
        """Serve until the client closes or is gone; then the process ends, also in mid-step or mid-load."""
        try:
            while not isinstance(command := self._connection.receive(), Close | None):
                self._attached.wait()
                assert self._loop is not None
                self._loop.handle(command)
        except BaseException:
            # A frame that cannot be read: nothing after it can be trusted, and nobody may wait for ever.
            traceback.print_exc()
            os._exit(1)
        os._exit(0)


def die_with_parent(parent_pid: int) -> None:
    """End within moments of the parent's death, whatever this process does then.

    The kernel's signal (Linux) comes even while a library holds the interpreter lock. It fires when the
    *thread* that started this process ends, which is right because that thread reads our socket until the
    end. Elsewhere, and should it be lost, a thread polls: a child forked by the agent may hold the
    socket's other end open, so the end of the socket alone is not enough.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_WATCH_INTERVAL_S)
        os._exit(0)

    threading.Thread(target=watch, name="paceline-parent-watch", daemon=True).start()


if __name__ == "__main__":
    main()
