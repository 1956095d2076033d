"""Hosts the step loop: commands in from one thread, steps on another, events out."""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from paceline_engine.backends.base import ModelInfo
from paceline_engine.backends.embedded.messages import (
    Abort,
    AdapterChanged,
    ChangeAdapter,
    ChangeVariant,
    Close,
    Command,
    Compare,
    Died,
    EndSession,
    Event,
    Pin,
    RenewPolicy,
    SnapshotTaken,
    Stepped,
    Submit,
    TakeSnapshot,
    Unpin,
    portable,
)
from paceline_engine.core.base import StepOutput
from paceline_engine.errors import EngineDiedError, InvalidValueError, PacelineError
from paceline_engine.fidelity import FidelityRequest
from paceline_engine.mode import Variant
from paceline_engine.plan import Plan
from paceline_engine.request import GenerationRequest, ScoreRequest
from paceline_engine.schedule.base import StepDecision, StepPolicy, StepState
from paceline_engine.snapshot import Snapshot

logger = logging.getLogger("paceline.engine.loop")

_IDLE_S = 1.0
"""Rest after which ``when_idle`` is called: the first turn mostly comes right after the start."""


class SteppingEngine(Protocol):
    """The engine as its host sees it. All but ``step`` may be called while ``step`` runs."""

    @property
    def has_work(self) -> bool: ...

    def submit(self, request: GenerationRequest, plan: Plan, *, submitted_at_s: float) -> None: ...

    def submit_score(self, request: ScoreRequest, plan: Plan, *, submitted_at_s: float) -> None: ...

    def submit_fidelity(self, request: FidelityRequest) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def change_variant(self, request_id: str, variant: Variant) -> None: ...

    def pin(
        self, pin_id: str, token_ids: tuple[int, ...], *, hold_s: float, salt: str, adapter: str | None
    ) -> int: ...

    def unpin(self, pin_id: str) -> None: ...

    def end_session(self, session: str, *, salt: str = "") -> None: ...

    @property
    def adapters(self) -> tuple[str, ...]: ...

    def load_adapter(self, name: str, path: str) -> None: ...

    def unload_adapter(self, name: str) -> None: ...

    def snapshot(
        self, token_ids: tuple[int, ...], *, salt: str = "", adapter: str | None = None
    ) -> Snapshot: ...

    def step(self) -> StepOutput: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedEngine:
    """What a source's ``open_engine`` gives."""

    engine: SteppingEngine
    info: ModelInfo
    when_idle: Callable[[], None] | None = None
    """Called once, when nothing has run for a while: what would hold streams up later."""


class RenewablePolicy:
    """A step policy made by a factory from numbers that may be renewed while the engine runs."""

    def __init__(
        self, factory: Callable[[Mapping[str, Any]], StepPolicy], numbers: Mapping[str, Any]
    ) -> None:
        self._factory = factory
        self._policy = factory(numbers)

    def renew(self, numbers: Mapping[str, Any]) -> None:
        """Make the policy anew; the next step uses it."""
        self._policy = self._factory(numbers)

    def decide_step(self, state: StepState) -> StepDecision:
        return self._policy.decide_step(state)


def load_policy(path: str | None, numbers: Mapping[str, Any]) -> RenewablePolicy | None:
    """Import ``module:factory`` and call it; None where no policy is named.

    Raises:
        InvalidValueError: it cannot be imported, or the factory refuses the numbers.
    """
    if path is None:
        return None
    module, _, name = path.partition(":")
    try:
        return RenewablePolicy(getattr(importlib.import_module(module), name), numbers)
    except PacelineError:
        raise
    except Exception as error:
        raise InvalidValueError(
            "step_policy",
            observed=path,
            limit="a factory that the worker can import and call with its numbers",
            remedy=f"mend this: {type(error).__name__}: {error}",
        ) from error


class EngineLoop:
    """Runs ``engine.step`` while there is work and sleeps while there is none."""

    def __init__(
        self,
        engine: SteppingEngine,
        *,
        emit: Callable[[Event], None],
        policy: RenewablePolicy | None = None,
        when_idle: Callable[[], None] | None = None,
    ) -> None:
        self._engine = engine
        self._when_idle = when_idle
        self._emit = emit
        self._policy = policy
        self._wake = threading.Event()
        self._stopping = False
        self._died: str | None = None
        self._compiling: dict[str, bool] = {}
        """Requests whose grammars are being compiled, and whether they were aborted meanwhile."""
        self._compiling_lock = threading.Lock()

    def run(self) -> None:
        """Step until stopped, or until a step raises: then ``Died`` is the last event."""
        while not self._stopping:
            if not self._engine.has_work:
                if self._wake.wait(None if self._when_idle is None else _IDLE_S):
                    # Cleared before the work is looked at again, so a command in between is never missed.
                    self._wake.clear()
                elif self._when_idle is not None:
                    self._when_idle()
                    self._when_idle = None
                continue
            try:
                output = self._step()
            except Exception as error:
                logger.exception("the step loop ends")
                self._died = f"a step raised {type(error).__name__}: {error}"
                self._emit(Died(reason=self._died))
                return
            if output.errors:
                output = replace(output, errors=tuple((id_, portable(error)) for id_, error in output.errors))
            if output != _NOTHING:
                self._emit(Stepped(output=output))

    def stop(self) -> None:
        """End ``run`` after the step that it is in."""
        self._stopping = True
        self._wake.set()

    def handle(self, command: Command) -> None:
        """Carry out one command, from any thread, without waiting for a running step."""
        try:
            self._carry_out(command)
        except Exception:
            # A change of variant or numbers that is refused leaves streams as they were; whoever
            # delivers commands must live on. Submissions and snapshots answer with their errors.
            logger.exception("%s was refused", type(command).__name__)
        self._wake.set()

    def _carry_out(self, command: Command) -> None:
        match command:
            case Submit(request=GenerationRequest(grammar=grammar)) if grammar is not None:
                self._submit_apart(command)
            case Submit() | Compare():
                self._submit(command)
            case Abort(request_id=request_id):
                self._abort(request_id)
            case ChangeVariant():
                self._engine.change_variant(command.request_id, command.variant)
            case TakeSnapshot():
                self._emit(SnapshotTaken(call_id=command.call_id, result=self._snapshot(command)))
            case Pin():
                self._engine.pin(
                    command.pin_id,
                    command.token_ids,
                    hold_s=command.hold_s,
                    salt=command.salt,
                    adapter=command.adapter,
                )
            case Unpin(pin_id=pin_id):
                self._engine.unpin(pin_id)
            case EndSession(session=session, salt=salt):
                self._engine.end_session(session, salt=salt)
            case ChangeAdapter():
                # Reading it takes a while; other commands must not wait for it.
                change = threading.Thread(
                    target=self._change_adapter, args=(command,), name="paceline-adapter", daemon=True
                )
                change.start()
            case RenewPolicy(numbers=numbers):
                if self._policy is not None:
                    self._policy.renew(numbers)
            case Close():
                self.stop()

    def _step(self) -> StepOutput:
        began_s = time.monotonic()
        output = self._engine.step()
        if output == _NOTHING and time.monotonic() - began_s < 5e-4:
            # Work that cannot run yet (no free block, weights that load): let in what would change that.
            self._wake.wait(0.001)
            self._wake.clear()
        return output

    def _submit_apart(self, command: Submit) -> None:
        """Compile and submit on a thread of its own: other commands must not wait for a heavy grammar."""
        request_id = command.request.id

        def submit() -> None:
            self._submit(command)
            with self._compiling_lock:
                aborted = self._compiling.pop(request_id)
            if aborted:
                self._engine.abort(request_id)
            self._wake.set()

        with self._compiling_lock:
            self._compiling[request_id] = False
        threading.Thread(target=submit, name="paceline-grammar", daemon=True).start()

    def _abort(self, request_id: str) -> None:
        with self._compiling_lock:
            if request_id in self._compiling:
                self._compiling[request_id] = True
                return
        self._engine.abort(request_id)

    def _submit(self, command: Submit | Compare) -> None:
        request = command.request
        try:
            if self._died is not None:
                raise EngineDiedError(f"the engine died before: {self._died}")
            if isinstance(command, Compare):
                self._engine.submit_fidelity(command.request)
            elif isinstance(command.request, ScoreRequest):
                self._engine.submit_score(
                    command.request, command.plan, submitted_at_s=command.submitted_at_s
                )
            else:
                self._engine.submit(command.request, command.plan, submitted_at_s=command.submitted_at_s)
        except Exception as error:
            self._fail(request.id, error)

    def _change_adapter(self, command: ChangeAdapter) -> None:
        result: tuple[str, ...] | PacelineError
        try:
            if command.path is None:
                self._engine.unload_adapter(command.name)
            else:
                self._engine.load_adapter(command.name, command.path)
            result = self._engine.adapters
        except Exception as error:
            result = portable(error)
        self._emit(AdapterChanged(call_id=command.call_id, result=result))

    def _snapshot(self, command: TakeSnapshot) -> Snapshot | PacelineError:
        try:
            return self._engine.snapshot(command.token_ids, salt=command.salt, adapter=command.adapter)
        except Exception as error:
            return portable(error)

    def _fail(self, request_id: str, error: Exception) -> None:
        self._emit(Stepped(output=StepOutput(errors=((request_id, portable(error)),))))


_NOTHING = StepOutput()
