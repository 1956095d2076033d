"""The client's side of one worker, from its start to its end: who waits for what."""

from __future__ import annotations

import concurrent.futures
import copy
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeAlias, TypeVar

from paceline_engine.backends.base import ModelInfo, Progress
from paceline_engine.backends.embedded.config import EmbeddedConfig
from paceline_engine.backends.embedded.inbox import Inbox
from paceline_engine.backends.embedded.messages import (
    Abort,
    AdapterChanged,
    ChangeAdapter,
    ChangeVariant,
    Command,
    Compare,
    Died,
    Event,
    Launch,
    Loading,
    Lost,
    Ready,
    SnapshotTaken,
    StartFailed,
    Stepped,
    Submit,
    TakeSnapshot,
)
from paceline_engine.backends.embedded.process import ProcessTransport
from paceline_engine.chunk import Chunk, ScoreResult
from paceline_engine.core.base import StepOutput
from paceline_engine.errors import ClosedError, EngineDiedError, InvalidValueError, PacelineError
from paceline_engine.fidelity import Fidelity, FidelityRequest
from paceline_engine.mode import Variant
from paceline_engine.plan import Plan
from paceline_engine.request import GenerationRequest, ScoreRequest
from paceline_engine.snapshot import Snapshot

AnyRequest = TypeVar("AnyRequest", GenerationRequest, ScoreRequest)


Item: TypeAlias = (
    Chunk | ScoreResult | Snapshot | Mapping[Variant, Fidelity] | tuple[str, ...] | PacelineError
)


class Transport(Protocol):
    """Carries commands to a step loop and its events back."""

    @property
    def pid(self) -> int | None: ...

    def start(self) -> None: ...

    def send(self, command: Command) -> None: ...

    def close(self) -> None: ...

    def kill(self) -> None: ...


class Call:
    """One request in flight: where its items go, and how many finish chunks it waits for."""

    __slots__ = ("id", "inbox", "request_id", "unfinished")

    def __init__(self, *, id: str, request_id: str, unfinished: int) -> None:
        self.id = id
        """Unique for the session, so that what an aborted request still sends reaches no later one."""
        self.request_id = request_id
        self.inbox: Inbox[Item] = Inbox()
        self.unfinished = unfinished


class Session:
    """Demultiplexes one worker's events.

    ``dispatch`` runs on the transport's thread; all else on any thread, ``abandon`` also inside
    finalizers. There is no lock: single dictionary operations suffice, and a call that is opened while
    the worker ends looks for the end again after it has entered itself.
    """

    def __init__(self, config: EmbeddedConfig, *, step_policy_numbers: Mapping[str, Any]) -> None:
        self.ready: concurrent.futures.Future[ModelInfo] = concurrent.futures.Future()
        # Running from the start: a caller that is cancelled must not cancel it for the others.
        self.ready.set_running_or_notify_cancel()
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.ended.set_running_or_notify_cancel()
        self.started_at_s = time.monotonic()
        self.ready_at_s: float | None = None
        self.lost: PacelineError | None = None
        """Why the worker serves no more."""
        self.on_progress: list[Callable[[Progress], None]] = []
        self._calls: dict[str, Call] = {}
        self._ids: dict[str, str] = {}
        self._counter = itertools.count()
        launch = Launch(config=config, step_policy_numbers=dict(step_policy_numbers))
        self._host = "worker process" if config.host == "process" else "step thread"
        self.transport: Transport
        if config.host == "process":
            self.transport = ProcessTransport(launch, on_event=self.dispatch)
        else:
            # Not with this module: the worker, whose parts it shares, is run as a program of its own.
            from paceline_engine.backends.embedded.thread import ThreadTransport

            self.transport = ThreadTransport(launch, on_event=self.dispatch)

    def submit(self, request: AnyRequest, plan: Plan, *, submitted_at_s: float) -> Call:
        """Send a request.

        Raises:
            InvalidValueError: a request of this id is in flight.
            EngineDiedError, ClosedError: the worker serves no more.
        """
        call = self._open(request.id, unfinished=getattr(request, "n", 1))
        if self._ids.setdefault(request.id, call.id) != call.id:
            self._calls.pop(call.id, None)
            raise InvalidValueError(
                "id",
                observed=request.id,
                limit="unique among the requests in flight",
                remedy="use a new id for every request",
            )
        wire = _portable_request(replace(request, id=call.id))
        try:
            self.transport.send(Submit(request=wire, plan=plan, submitted_at_s=submitted_at_s))
        except Exception as error:
            self.release(call)
            raise InvalidValueError(
                "request",
                observed=request,
                limit="made of plain data",
                remedy=f"it cannot reach the worker: {type(error).__name__}: {error}",
            ) from error
        self._check(call)
        return call

    def snapshot(self, token_ids: tuple[int, ...], *, salt: str, adapter: str | None) -> Call:
        """Ask for a snapshot; its inbox gets the answer."""
        call = self._open("snapshot", unfinished=1)
        self.transport.send(TakeSnapshot(call_id=call.id, token_ids=token_ids, salt=salt, adapter=adapter))
        self._check(call)
        return call

    def change_adapter(self, name: str, path: str | None) -> Call:
        """Load an adapter, or unload it where there is no path; its inbox gets the answer."""
        call = self._open("adapter", unfinished=1)
        self.transport.send(ChangeAdapter(call_id=call.id, name=name, path=path))
        self._check(call)
        return call

    def compare(self, request: FidelityRequest) -> Call:
        """Ask for a comparison of the variants; its inbox gets the answer."""
        call = self._open(request.id, unfinished=1)
        self.transport.send(Compare(request=replace(request, id=call.id)))
        self._check(call)
        return call

    def change_variant(self, request_id: str, variant: Variant) -> None:
        """Move a running stream; nothing happens where it has ended."""
        if (call_id := self._ids.get(request_id)) is not None:
            self.transport.send(ChangeVariant(request_id=call_id, variant=variant))

    def release(self, call: Call) -> bool:
        """Forget a call that has ended. False where it was forgotten before."""
        if self._calls.pop(call.id, None) is None:
            return False
        if self._ids.get(call.request_id) == call.id:
            self._ids.pop(call.request_id, None)
        return True

    def abandon(self, call: Call) -> None:
        """Abort a call that nobody waits for any more; nothing happens where it has ended."""
        if self.release(call):
            self.transport.send(Abort(request_id=call.id))

    def close(self) -> None:
        """Fail what waits, and ask the worker to end."""
        self._fail(ClosedError("the backend was closed while this ran"))
        self.transport.close()

    def fail(self, error: PacelineError) -> None:
        """Give the worker up: everyone waiting gets the error."""
        self._fail(error)
        self.transport.kill()

    def dispatch(self, event: Event) -> None:
        match event:
            case Stepped(output=output):
                self._deliver(output)
            case (
                SnapshotTaken(call_id=call_id, result=result) | AdapterChanged(call_id=call_id, result=result)
            ):
                self._end(call_id, result)
            case Loading(progress=progress):
                for listener in tuple(self.on_progress):
                    listener(progress)
            case Ready(info=info):
                self.ready_at_s = time.monotonic()
                if not self.ready.done():
                    self.ready.set_result(info)
            case StartFailed(error=error):
                self._fail(error)
            case Died(reason=reason):
                self._fail(self._death(reason))
            case Lost(reason=reason, details=details):
                self._fail(self._death(f"{reason}\n{details}" if details else reason))
                self.ended.set_result(None)

    def _open(self, request_id: str, *, unfinished: int) -> Call:
        if self.lost is not None:
            raise copy.copy(self.lost)
        call = Call(id=f"{request_id}#{next(self._counter)}", request_id=request_id, unfinished=unfinished)
        self._calls[call.id] = call
        return call

    def _check(self, call: Call) -> None:
        """Answer a call that slipped in while the worker was being given up."""
        if self.lost is not None and self.release(call):
            call.inbox.put(self.lost)

    def _deliver(self, output: StepOutput) -> None:
        for call_id, chunk in output.chunks:
            call = self._calls.get(call_id)
            if call is None:
                continue
            if chunk.finish is not None:
                call.unfinished -= 1
                if call.unfinished == 0:
                    self.release(call)
            call.inbox.put(chunk)
        for call_id, score in output.scores:
            self._end(call_id, score)
        for call_id, found in output.fidelities:
            self._end(call_id, found)
        for call_id, error in output.errors:
            self._end(call_id, error)

    def _end(self, call_id: str, item: Item) -> None:
        call = self._calls.get(call_id)
        if call is not None and self.release(call):
            call.inbox.put(item)

    def _fail(self, error: PacelineError) -> None:
        if self.lost is None:
            self.lost = error
        if not self.ready.done():
            self.ready.set_exception(self.lost)
        for call in tuple(self._calls.values()):
            if self.release(call):
                call.inbox.put(self.lost)

    def _death(self, reason: str) -> EngineDiedError:
        return EngineDiedError(
            f"the {self._host} of the embedded backend died: {reason}\n"
            "The next call starts another; what was in flight has to be sent again."
        )


def _portable_request(request: AnyRequest) -> AnyRequest:
    """Without the messages, which the engine does not read and which may hold objects of the caller's."""
    slim = replace(request, prompt=replace(request.prompt, messages=()))
    if isinstance(slim, GenerationRequest):
        sampling = replace(slim.sampling, logit_bias=dict(slim.sampling.logit_bias))
        return replace(slim, sampling=sampling)
    return slim
