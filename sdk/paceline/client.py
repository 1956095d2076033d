"""The client: a started backend, what is known of its speed, and turns on it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self
from uuid import uuid4

from paceline.ledger import Clock, Ledger
from paceline.options import check_messages, check_name, check_slo, parse_options
from paceline.pin import PrefixPin
from paceline.policy import Ask, Policy, Served
from paceline.progress import default_progress
from paceline.turn import AsyncTurn, Messages, Ready, Tools
from paceline_engine.backends.base import Backend, ModelInfo, OnProgress, Pinning, Remembering
from paceline_engine.chunk import Usage
from paceline_engine.errors import ClosedError, InvalidValueError, MissingExtraError, UnknownOptionError
from paceline_engine.mode import Mode, Variant
from paceline_engine.numeric import is_finite, is_number
from paceline_engine.plan import Plan
from paceline_engine.request import GenerationRequest
from paceline_engine.snapshot import Snapshot
from paceline_policies.pacing import STEP_POLICY
from paceline_policies.slo import SLO

if TYPE_CHECKING:
    from paceline.calibrate import ProfileOption
    from paceline.planner import Planner
    from paceline.tracing.spans import TurnSpan
    from paceline_policies.profile import Profile

DEFAULT_MODEL = "gemma3-270m"


class AsyncClient:
    """Runs turns on the embedded engine, or on the backends given.

    ``async with`` starts and closes it; without it the first turn starts it, and ``aclose`` closes it. It
    may be used from several event loops and threads.
    """

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
        """Nothing is loaded yet.

        Args:
            model: for the embedded engine: a GGUF file, a safetensors folder, the name of an installed
                model package, or a hub id.
            backend: instead of the embedded engine; closed with the client.
            slo: what turns get that name none; the default is ``SLO()``.
            profile: where predictions come from, see ``ProfileOption``, or a profile of your own.
            on_progress: told how far a slow start came; the default is a bar on a terminal's stderr.
            device: for the embedded engine, as the next five: ``cpu``, ``cuda``, ``cuda:1``, or ``auto``,
                the default: CUDA where there is one.
            variants: the precisions that a plan may ask for, best quality first; the default is ``bf16``,
                ``int8`` and ``int4``. All of them are held in memory.
            adapters: LoRA adapters, as folders that PEFT saved, by the names that calls give as
                ``adapter=``; ``EmbeddedBackend.load_adapter`` adds others while it runs.
            kv_tokens: how many tokens the KV cache holds, for all running sequences together and the cached
                prefixes; the default is 16,384, or less where the model's context is small.
            n_threads: threads of one step; the default is the physical cores that this process may use.
            host: ``process`` for a worker process of the client's own, ``thread`` for this process, where
                busy Python threads slow the steps down.
            tracing: whether turns are recorded through OpenTelemetry's API.
            clock: monotonic seconds; tests give a ``paceline.testing.ManualClock``.
            policy: decides instead of the predictor and its profile.

        Raises:
            InvalidValueError: a value that is not allowed, or an option of the embedded engine beside
                ``backend``. The engine's own options and the model are checked by ``start``.
        """
        options = {
            "device": device,
            "variants": variants,
            "adapters": adapters,
            "kv_tokens": kv_tokens,
            "n_threads": n_threads,
        }
        given = {name: value for name, value in options.items() if value is not None}
        if backend is not None and (given or host != "process"):
            raise InvalidValueError(
                next(iter(given), "host"),
                observed=next(iter(given.values()), host),
                limit="left out where a backend is given",
                remedy="configure the backend that you pass",
            )
        check_slo(slo)
        _check_profile(profile)
        _check_parts(clock=clock, on_progress=on_progress, policy=policy, tracing=tracing)
        self._model = _model_name(model)
        self._backends = None if backend is None else _named(backend)
        self._engine_options: dict[str, Any] = {**given, "host": host}
        self._slo = SLO() if slo is None else slo
        self._profile: ProfileOption | Profile = profile
        self._on_progress = on_progress
        self._tracing = tracing
        self._clock = clock
        self._policy = policy
        self._ready: Ready | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._starting: concurrent.futures.Future[None] | None = None
        self._pid = os.getpid()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._label()}>"

    def _label(self) -> str:
        served = ", ".join(self._backends) if self._backends is not None else self._model
        state = "closed" if self._closed else "not started" if self._ready is None else "started"
        return f"{served}: {state}"

    @property
    def slo(self) -> SLO:
        """What turns get that name none."""
        return self._slo

    @property
    def closed(self) -> bool:
        """Whether ``aclose`` was called; a closed client opens no turns."""
        return self._closed

    @property
    def models(self) -> Mapping[str, ModelInfo]:
        """What each backend serves, by the backend's name; empty before the start."""
        ready = self._ready
        return {} if ready is None else {name: each.info for name, each in ready.served.items()}

    async def start(self) -> None:
        """Load the model, and calibrate where no profile is saved; calling it again returns at once.

        Raises:
            ModelError, MissingExtraError: see ``Backend.start``.
            ClosedError: the client was closed, or belongs to the parent process.
        """
        await self._started()

    async def _started(self) -> Ready:
        while True:
            self._check_usable()
            if self._ready is not None:
                return self._ready
            with self._lock:
                starting, mine = self._starting, concurrent.futures.Future[None]()
                if starting is None:
                    self._starting = mine
            if starting is not None:
                # Shielded: a waiter that is cancelled must not cancel the start for the others.
                await asyncio.shield(asyncio.wrap_future(starting))
                continue
            try:
                self._ready = await self._start()
            except BaseException as error:
                with self._lock:
                    self._starting = None
                if isinstance(error, Exception):
                    mine.set_exception(error)
                else:
                    mine.set_result(None)
                raise
            mine.set_result(None)
            return self._ready

    async def _start(self) -> Ready:
        if self._backends is None:
            self._backends = _named(_embedded(self._model, self._engine_options))
        # Runs while the start of a worker is waited for.
        asyncio.get_running_loop().call_soon(self._import_late)
        with default_progress(self._on_progress) as on_progress:
            served = {
                name: Served(backend=backend, info=await backend.start(on_progress))
                for name, backend in self._backends.items()
            }
            policy = self._policy
            if policy is None:
                policy = await _planner(served, self._profile, on_progress)
        self._rehearse(served, policy)
        return Ready(served=served, policy=policy)

    def _import_late(self) -> None:
        """Import what the client's own start does not need, and a turn does."""
        import_module("paceline.planner")
        import_module("paceline.calibrate")
        import_module("paceline.verdicts")
        if self._tracing:
            from opentelemetry.trace import NoOpTracerProvider

            from paceline.tracing.spans import start_turn

            start_turn("", slo=self._slo, started_at_s=self._clock(), tracer_provider=NoOpTracerProvider())

    def _rehearse(self, served: Mapping[str, Served], policy: Policy) -> None:
        """Pay for late imports and first decisions here, not out of the first turn's budgets."""
        from paceline.planner import Planner

        self._import_late()
        now_s = self._clock()
        left = Ledger(self._slo, opened_at_s=now_s, clock=self._clock).left(called_at_s=now_s)
        ask = Ask(slo=self._slo, left=left, now_s=now_s, deadline_at_s=None, max_tokens=16)
        looks = {name: Snapshot(taken_at_s=now_s, prompt_tokens=16) for name in served}
        if isinstance(policy, Planner):
            policy.decide(ask, looks)

    async def aclose(self) -> None:
        """Save what was learned, end all that runs and close the backends; again does nothing."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        async with AsyncExitStack() as closing:
            # Whatever fails on the way, every backend is closed.
            for backend in reversed((self._backends or {}).values()):
                closing.push_async_callback(backend.aclose)
            if self._ready is not None:
                self._ready.policy.save()

    def turn(self, name: str = "agent", *, slo: SLO | None = None) -> AsyncTurn:
        """A turn, to be opened with ``async with``. Its budgets count from there.

        Args:
            name: of the agent, for traces and reports.
            slo: the budgets; the default is the client's.

        Raises:
            InvalidValueError: ``name`` is no text or empty, or ``slo`` is no SLO.
            ClosedError: the client was closed, or belongs to the parent process.
        """
        self._check_usable()
        check_name(name)
        check_slo(slo)
        return AsyncTurn(
            name=name,
            slo=self._slo if slo is None else slo,
            clock=self._clock,
            start=self._started,
            start_span=self._start_span,
        )

    async def warm(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        salt: str = "",
        adapter: str | None = None,
        pin_s: float | None = None,
    ) -> Usage:
        """Prefill a prefix, such as a long system policy, into the prefix cache ahead of any turn.

        One token is generated at the best variant, whose blocks serve all others too. It counts against
        no turn's budgets. Returns the usage on the first backend. Blocks that no turn has used for long
        give way when the KV cache is full; ``pin_s`` keeps these for so many seconds, within a share of
        the cache, where the backend can.

        Raises:
            InvalidValueError: no messages, or messages that the chat template refuses.
            ClosedError, GenerationError: as any generation.
        """
        if pin_s is not None and not (is_number(pin_s) and is_finite(pin_s) and pin_s > 0):
            raise InvalidValueError(
                "pin_s", observed=pin_s, limit="a finite time above 0, or None", remedy="give seconds"
            )
        checked = check_messages(messages)
        options = parse_options({"salt": salt, "adapter": adapter})
        ready = await self._started()

        async def one(served: Served) -> Usage:
            prompt = await served.backend.prepare(checked, tools=tools)
            request = GenerationRequest(
                id=uuid4().hex,
                prompt=prompt,
                salt=options.salt,
                adapter=options.adapter,
                ignore_eos=True,
            )
            plan = Plan(mode=Mode(variant=served.info.variants[0]), max_tokens=1)
            usage = Usage(prompt_tokens=prompt.n_tokens, completion_tokens=0)
            async for chunk in served.backend.submit(request, plan):
                if chunk.finish is not None:
                    usage = chunk.finish.usage
            if pin_s is not None and isinstance(served.backend, Pinning):
                PrefixPin(served.backend, prompt, salt=options.salt, adapter=options.adapter, hold_s=pin_s)
            return usage

        return (await asyncio.gather(*(one(served) for served in ready.served.values())))[0]

    def end_session(self, session: str, *, salt: str = "") -> None:
        """Forget what was said in a session; see the option ``session``. An unknown one is ignored.

        Raises:
            ClosedError: the client was closed, or belongs to the parent process.
        """
        self._check_usable()
        if self._ready is not None:
            for served in self._ready.served.values():
                if isinstance(served.backend, Remembering):
                    served.backend.end_session(session, salt=salt)

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError("this client belongs to the parent process: make one after the fork")
        if self._closed:
            raise ClosedError("the client is closed: make a new one")

    def _start_span(self, name: str, *, slo: SLO, started_at_s: float) -> TurnSpan:
        if self._tracing:
            from paceline.tracing.spans import start_turn

            return start_turn(name, slo=slo, started_at_s=started_at_s)
        from paceline.untraced import UntracedTurn

        return UntracedTurn()


def _check_profile(profile: object) -> None:
    if profile in ("auto", "calibrate", "quick", "assume"):
        return
    from paceline_policies.profile import Profile

    if isinstance(profile, Profile):
        return
    raise UnknownOptionError(
        "profile",
        observed=profile,
        limit="'auto', 'calibrate', 'quick', 'assume' or a Profile",
        remedy="'auto' reads the saved one, or calibrates",
    )


def _model_name(model: object) -> str:
    if isinstance(model, (str, os.PathLike)) and isinstance(name := os.fspath(model), str) and name:
        return str(name)
    raise InvalidValueError(
        "model",
        observed=model,
        limit="a non-empty text or a path",
        remedy=f"give a file, a folder, a hub id, or leave it out for '{DEFAULT_MODEL}'",
    )


def _check_parts(*, clock: object, on_progress: object, policy: object, tracing: object) -> None:
    """What is called only later is looked at here, where its name stands."""
    decides = all(hasattr(policy, name) for name in ("decide", "observe", "queue_ms", "save"))
    for name, value, fits, limit in (
        ("clock", clock, callable(clock), "callable"),
        ("on_progress", on_progress, on_progress is None or callable(on_progress), "callable or None"),
        ("policy", policy, policy is None or decides, "a paceline.policy.Policy or None"),
        ("tracing", tracing, isinstance(tracing, bool), "True or False"),
    ):
        if not fits:
            raise InvalidValueError(name, observed=value, limit=limit, remedy="leave it out for the default")


async def _planner(
    served: Mapping[str, Served], option: ProfileOption | Profile, on_progress: OnProgress
) -> Planner:
    from paceline import profiles
    from paceline.calibrate import profile_of, version
    from paceline.planner import Planner

    found: dict[str, Profile] = {}
    savers: dict[str, Callable[[Profile], object]] = {}
    for name, each in served.items():
        found[name], learns = await profile_of(each, option, on_progress=on_progress)
        if learns:
            path = profiles.profile_path(each.info, version=version())
            savers[name] = partial(profiles.save, path)
    return Planner(served, found, save=savers)


def _named(backend: Backend | Sequence[Backend]) -> dict[str, Backend]:
    backends = list(backend) if isinstance(backend, Sequence) else [backend]
    for each in backends:
        if not all(hasattr(each, name) for name in ("name", "start", "prepare", "snapshot", "submit")):
            raise InvalidValueError(
                "backend",
                observed=each,
                limit="one or several Backend objects",
                remedy="leave it out for the embedded engine, and name a model instead",
            )
    names = [each.name for each in backends]
    if not backends or len(set(names)) != len(names):
        raise InvalidValueError(
            "backend",
            observed=names,
            limit="at least one, each with a name of its own",
            remedy="give each backend another name",
        )
    return dict(zip(names, backends, strict=True))


def require_engine() -> None:
    """Raise MissingExtraError where the embedded engine is not installed."""
    # Looked for, not imported: torch belongs into the worker, and takes seconds to load.
    if any(find_spec(needed) is None for needed in ("tokenizers", "torch")):
        raise MissingExtraError("engine", needed_for="the embedded engine")


def _embedded(model: str, options: dict[str, Any]) -> Backend:
    require_engine()
    from paceline_engine.backends.embedded import EmbeddedBackend, EmbeddedConfig

    return EmbeddedBackend(EmbeddedConfig(model=model, step_policy=STEP_POLICY, **options))
