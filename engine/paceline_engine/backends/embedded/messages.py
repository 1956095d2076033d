"""What a client and its worker say to each other, and how it is framed.

Frames are a 4-byte big-endian length and a pickle of one of the dataclasses below. Pickle is right here
and only here: both ends are the same program of the same user, joined by a private socket pair that
has no name, and the vocabulary crosses as it is, without a second description to keep in step.
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline_engine.backends.base import ModelInfo, Progress
from paceline_engine.backends.embedded.config import EmbeddedConfig
from paceline_engine.core.base import StepOutput
from paceline_engine.errors import BackendError, InvalidValueError, PacelineError
from paceline_engine.fidelity import FidelityRequest
from paceline_engine.mode import Variant
from paceline_engine.plan import Plan
from paceline_engine.request import GenerationRequest, ScoreRequest
from paceline_engine.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The first frame: what the worker is to load."""

    config: EmbeddedConfig
    step_policy_numbers: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    request: GenerationRequest | ScoreRequest
    plan: Plan
    submitted_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeVariant:
    request_id: str
    variant: Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeSnapshot:
    call_id: str
    token_ids: tuple[int, ...]
    salt: str
    adapter: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compare:
    request: FidelityRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    pin_id: str
    token_ids: tuple[int, ...]
    hold_s: float
    salt: str
    adapter: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpin:
    pin_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndSession:
    session: str
    salt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeAdapter:
    call_id: str
    name: str
    path: str | None
    """None to serve it no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewPolicy:
    numbers: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    pass


Command = (
    Submit
    | Abort
    | ChangeVariant
    | TakeSnapshot
    | Compare
    | Pin
    | Unpin
    | EndSession
    | ChangeAdapter
    | RenewPolicy
    | Close
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    progress: Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    info: ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailed:
    error: PacelineError


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """All that one step brought forth, in one frame."""

    output: StepOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotTaken:
    call_id: str
    result: Snapshot | PacelineError


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterChanged:
    call_id: str
    result: tuple[str, ...] | PacelineError
    """The adapters that are served now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """The step loop raised; nothing more will come."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The connection ended. Made by the client's side of it, never sent."""

    reason: str
    details: str = field(default="")
    """The last lines that the worker wrote."""


Event = Loading | Ready | StartFailed | Stepped | SnapshotTaken | AdapterChanged | Died | Lost

_HEADER = struct.Struct(">I")
_BUFFER_BYTES = 1 << 20
_READ_BYTES = 1 << 16


def encode(message: object) -> bytes:
    """One frame. Raises what pickle does for objects that cannot leave the process."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(body)) + body


class Connection:
    """One end of the socket pair. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        # Room for a burst of steps, so that the step loop does not wait for the client's reader.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._socket = sock
        self._pending = bytearray()
        self._send_lock = threading.Lock()

    def send(self, message: object) -> None:
        """Send one message; blocks while the other end's buffer is full.

        Raises:
            OSError: the other end is gone.
        """
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        """Send what ``encode`` gave. Raises as ``send`` does."""
        with self._send_lock:
            self._socket.sendall(frame)

    def receive(self) -> Any:
        """The next message, or None when the other end is gone."""
        header = self._take(_HEADER.size)
        if header is None:
            return None
        body = self._take(_HEADER.unpack(header)[0])
        return None if body is None else pickle.loads(body)

    def close(self) -> None:
        """Free the descriptor; a process that shares the socket keeps its own."""
        self._socket.close()

    def _take(self, size: int) -> bytes | None:
        # A buffer of our own: a BufferedReader has a lock that a forked child would find held for ever.
        while len(self._pending) < size:
            try:
                received = self._socket.recv(_READ_BYTES)
            except OSError:
                return None
            if not received:
                return None
            self._pending += received
        taken = bytes(self._pending[:size])
        del self._pending[:size]
        return taken


def check_portable(field: str, values: Mapping[str, Any]) -> None:
    """Raises ``InvalidValueError`` for a mapping that cannot be sent to the worker."""
    try:
        pickle.dumps(dict(values))
    except Exception as error:
        raise InvalidValueError(
            field,
            observed=values,
            limit="plain data that can be pickled",
            remedy=f"leave out what cannot be: {type(error).__name__}: {error}",
        ) from error


def portable(error: BaseException) -> PacelineError:
    """The error as one of our tree that survives pickling; foreign ones become ``BackendError``."""
    if isinstance(error, PacelineError):
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return BackendError(f"{type(error).__name__}: {error}")
        return error
    return BackendError(f"the engine failed on this request: {type(error).__name__}: {error}")
