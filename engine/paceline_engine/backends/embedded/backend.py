"""The embedded backend: this project's engine in a worker process of the client's own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import dataclasses
import importlib
import math
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from paceline_engine.backends.base import ModelInfo, OnProgress, Progress
from paceline_engine.backends.embedded.config import EmbeddedConfig, checked_adapters
from paceline_engine.backends.embedded.messages import (
    EndSession,
    Pin,
    RenewPolicy,
    Unpin,
    check_portable,
    portable,
)
from paceline_engine.backends.embedded.session import Call, Item, Session
from paceline_engine.backends.embedded.stream import (
    EmbeddedStream,
    Opened,
    PendingCall,
    check_owner,
    refuse_expired,
)
from paceline_engine.backends.embedded.supervisor import Supervisor
from paceline_engine.chunk import Chunk, ScoreResult
from paceline_engine.errors import BackendError, InvalidValueError, ModelLoadError, PacelineError
from paceline_engine.fidelity import Fidelity, FidelityRequest
from paceline_engine.loading.base import LONG_TEXT_CHARACTERS, Tokenizer
from paceline_engine.loading.caller_text import texts_of
from paceline_engine.mode import Variant
from paceline_engine.plan import Plan
from paceline_engine.request import GenerationRequest, Message, Prompt, ScoreRequest
from paceline_engine.snapshot import Snapshot

T = TypeVar("T")


class EmbeddedBackend:
    """Implements ``Backend`` over a worker that it starts, watches and ends.

    The worker starts with ``start`` or with the first call that needs it. When it dies, everyone waiting
    gets ``EngineDiedError`` with the text so far, and the next call starts another, at most
    ``max_restarts_per_minute`` times a minute. Without ``aclose`` the worker ends with this object or
    with the interpreter. In a forked child every call raises ``ClosedError``, and ``aclose`` does nothing.
    """

    def __init__(self, config: EmbeddedConfig) -> None:
        check_portable("step_policy_numbers", config.step_policy_numbers)
        check_portable("source_options", config.source_options)
        self._config = config
        self._supervisor = Supervisor(config)
        self._tokenizer: concurrent.futures.Future[Tokenizer] | None = None
        self._tokenizer_lock = threading.Lock()
        self._owner_pid = os.getpid()
        weakref.finalize(self, self._supervisor.kill)

    @property
    def name(self) -> str:
        return self._config.name

    @property
    def config(self) -> EmbeddedConfig:
        return self._config

    @property
    def start_s(self) -> float | None:
        """Seconds from starting the current worker until it was ready; None while there is none."""
        session = self._supervisor.current
        if session is None or session.ready_at_s is None:
            return None
        return session.ready_at_s - session.started_at_s

    @property
    def worker_pid(self) -> int | None:
        """Process id of the step loop's host; None while there is none."""
        session = self._supervisor.current
        return None if session is None else session.transport.pid

    async def start(self, on_progress: OnProgress | None = None) -> ModelInfo:
        """Start the worker and load the model; calls while it loads join the one start.

        ``on_progress`` is called in the caller's event loop.

        Raises:
            ModelError: the model cannot be found, read or run, or took longer than ``start_timeout_s``.
            MissingExtraError: torch is not installed.
            EngineDiedError: the worker died while it loaded.
        """
        check_owner(self._owner_pid)
        # The tokenizer is read here while the worker imports torch.
        tokenizer = self._begin_tokenizer()
        session = await self._ready(on_progress)
        await _join(tokenizer, None)
        _result(tokenizer)
        return session.ready.result()

    async def prepare(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Prompt:
        """Render and tokenize a conversation in this process; needs neither torch nor the worker.

        A long one is tokenized on a thread, so that the event loop goes on.

        Raises:
            InvalidValueError: no messages, or messages that the template refuses.
            ModelError: the tokenizer cannot be found or read.
        """
        check_owner(self._owner_pid)
        tokenizer = await self._opened_tokenizer()
        if _is_long((messages, tools)):
            token_ids = tuple(await asyncio.to_thread(tokenizer.render_chat, messages, tools=tools))
        else:
            token_ids = tuple(tokenizer.render_chat(messages, tools=tools))
        return Prompt(messages=tuple(messages), token_ids=token_ids, n_tokens=len(token_ids))

    async def snapshot(self, prompt: Prompt, *, salt: str = "", adapter: str | None = None) -> Snapshot:
        """The state now; answered beside a running step."""
        session = await self._ready()
        call = session.snapshot(prompt.token_ids, salt=salt, adapter=adapter)
        # Told here, where it costs the worker no time; imported here, since NumPy would take a tenth of a
        # second of the way to the worker's start.
        from paceline_engine.speculate.history import repetition

        repeats = repetition(prompt.token_ids) if self._config.offered_speculations else None
        limit_s = self._config.answer_timeout_s
        try:
            if not await call.inbox.wait(time.monotonic() + limit_s):
                raise BackendError(
                    f"the worker gave no snapshot within {limit_s:.3g} s (answer_timeout_s): it is stopped "
                    "or starved of processor time"
                )
        finally:
            session.release(call)
        item = _answer(call)
        assert isinstance(item, Snapshot)
        return dataclasses.replace(item, repetition=repeats)

    def submit(self, request: GenerationRequest, plan: Plan) -> AsyncIterator[Chunk]:
        """Run a generation; the request is sent by the first ``__anext__``. See ``Backend.submit``."""
        return EmbeddedStream(
            request,
            plan,
            open_call=lambda submitted_at_s: self._open(request, plan, submitted_at_s),
            grace_s=self._config.deadline_grace_s,
        )

    async def score(self, request: ScoreRequest, plan: Plan) -> ScoreResult:
        """Score options; cancelling the task aborts the scoring. See ``Backend.score``."""
        check_owner(self._owner_pid)
        tokenizer = await self._opened_tokenizer()
        encode = partial(_encoded, tokenizer, request.options)
        encoded = await asyncio.to_thread(encode) if _is_long(request.options) else encode()
        request = dataclasses.replace(request, option_token_ids=encoded)
        pending = PendingCall(
            plan,
            open_call=lambda submitted_at_s: self._open(request, plan, submitted_at_s),
            grace_s=self._config.deadline_grace_s,
        )
        result = await pending.next_item()
        assert isinstance(result, ScoreResult)
        return result

    async def compare(self, request: FidelityRequest) -> Mapping[Variant, Fidelity]:
        """Compare the variants on a text. See ``base.Comparing``; cancelling the task aborts it."""
        check_owner(self._owner_pid)
        session = await self._ready()
        call = session.compare(request)
        try:
            await call.inbox.wait(None)
        finally:
            session.abandon(call)
        item = _answer(call)
        assert isinstance(item, Mapping)
        return item

    def change_variant(self, request_id: str, variant: Variant) -> None:
        """Move a running stream to another variant from its next step on.

        Never blocks; nothing happens where the request has ended.
        """
        check_owner(self._owner_pid)
        session = self._supervisor.current
        if session is not None:
            session.change_variant(request_id, variant)

    def pin(
        self,
        pin_id: str,
        prompt: Prompt,
        *,
        hold_s: float,
        salt: str = "",
        adapter: str | None = None,
    ) -> None:
        """Keep a prompt's cached prefix from eviction. See ``base.Pinning``."""
        check_owner(self._owner_pid)
        if not (math.isfinite(hold_s) and hold_s > 0):
            raise InvalidValueError(
                "hold_s", observed=hold_s, limit="a finite time above 0", remedy="give the longest wait"
            )
        if (session := self._supervisor.current) is not None:
            command = Pin(
                pin_id=pin_id, token_ids=prompt.token_ids, hold_s=hold_s, salt=salt, adapter=adapter
            )
            session.transport.send(command)

    def unpin(self, pin_id: str) -> None:
        """Let a pinned prefix be evicted again. See ``base.Pinning``."""
        check_owner(self._owner_pid)
        if (session := self._supervisor.current) is not None:
            session.transport.send(Unpin(pin_id=pin_id))

    def end_session(self, session: str, *, salt: str = "") -> None:
        """Forget what was said in a session. See ``base.Remembering``."""
        check_owner(self._owner_pid)
        if (worker := self._supervisor.current) is not None:
            worker.transport.send(EndSession(session=session, salt=salt))

    async def load_adapter(self, name: str, path: str | os.PathLike[str]) -> tuple[str, ...]:
        """Serve a LoRA adapter that PEFT saved, also in workers to come; gives the names of all that are.

        Under a name that is taken it replaces the other one, whose running streams end with it. Cached
        prefixes are kept by an adapter's weights, so new ones find nothing of the old ones'.

        Raises:
            InvalidValueError: an empty name.
            ModelError: it cannot be found or read, or is for another model; all stays as it was.
        """
        ((name, folder),) = checked_adapters({name: path}).items()
        return await self._change_adapter(name, folder)

    async def unload_adapter(self, name: str) -> tuple[str, ...]:
        """Serve it no more; its running streams end with it.

        Raises:
            UnknownOptionError: no adapter of that name is loaded.
        """
        return await self._change_adapter(name, None)

    def renew_step_policy(self, numbers: Mapping[str, Any]) -> None:
        """Give the step policy's factory new numbers, now and for workers to come. Never blocks.

        Raises:
            InvalidValueError: numbers that cannot be sent to the worker.
        """
        check_owner(self._owner_pid)
        check_portable("step_policy_numbers", numbers)
        session = self._supervisor.renew(numbers)
        if session is not None:
            session.transport.send(RenewPolicy(numbers=dict(numbers)))

    async def aclose(self) -> None:
        """End all that runs and the worker with it, within twice ``close_timeout_s``."""
        if os.getpid() != self._owner_pid:
            return
        session = self._supervisor.close()
        if session is None:
            return
        session.close()
        timeout_s = self._config.close_timeout_s
        try:
            await _join(session.ended, timeout_s)
        finally:
            if not session.ended.done():
                session.transport.kill()
        await _join(session.ended, timeout_s)

    async def _open(
        self, request: GenerationRequest | ScoreRequest, plan: Plan, submitted_at_s: float
    ) -> Opened:
        session = await self._ready()
        # Waiting for a worker may have used the time up.
        refuse_expired(plan, time.monotonic())
        if isinstance(request, ScoreRequest):
            return session, session.submit(request, plan, submitted_at_s=submitted_at_s)
        return session, session.submit(request, plan, submitted_at_s=submitted_at_s)

    async def _change_adapter(self, name: str, path: str | None) -> tuple[str, ...]:
        session = await self._ready()
        call = session.change_adapter(name, path)
        try:
            await call.inbox.wait(None)
        finally:
            session.release(call)
        names = _answer(call)
        assert isinstance(names, tuple)
        self._supervisor.keep_adapter(name, path)
        return names

    async def _ready(self, on_progress: OnProgress | None = None) -> Session:
        check_owner(self._owner_pid)
        if self._supervisor.current is None:
            _check_early(self._config)
        session = self._supervisor.session()
        if not session.ready.done():
            await self._wait_until_ready(session, on_progress)
        _result(session.ready)
        return session

    async def _wait_until_ready(self, session: Session, on_progress: OnProgress | None) -> None:
        loop = asyncio.get_running_loop()
        timeout_s = self._config.start_timeout_s

        def report(progress: Progress) -> None:
            assert on_progress is not None
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(on_progress, progress)

        if on_progress is not None:
            session.on_progress.append(report)
        try:
            left_s = session.started_at_s + timeout_s - time.monotonic()
            await _join(session.ready, max(0.0, left_s))
        finally:
            if on_progress is not None:
                session.on_progress.remove(report)
        if not session.ready.done():
            session.fail(
                ModelLoadError(
                    self._config.model,
                    reason=f"it was not loaded within {timeout_s:.3g} s",
                    remedy="raise start_timeout_s, or choose fewer variants",
                )
            )

    async def _opened_tokenizer(self) -> Tokenizer:
        opening = self._begin_tokenizer()
        await _join(opening, None)
        return _result(opening)

    def _begin_tokenizer(self) -> concurrent.futures.Future[Tokenizer]:
        """Open the tokenizer on a thread, once; again where that failed before."""
        with self._tokenizer_lock:
            opening = self._tokenizer
            if opening is not None and (not opening.done() or opening.exception() is None):
                return opening
            self._tokenizer = opening = concurrent.futures.Future()
            opening.set_running_or_notify_cancel()
            threading.Thread(
                target=_open_tokenizer, args=(self._config, opening), name="paceline-tokenizer", daemon=True
            ).start()
            return opening


def _is_long(value: object) -> bool:
    """Whether its texts together take longer to encode than an event loop should wait."""
    n_characters = 0
    for text in texts_of(value):
        n_characters += len(text)
        if n_characters >= LONG_TEXT_CHARACTERS:
            return True
    return False


def _encoded(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tokenizer.encode(text)) for text in texts)


def _check_early(config: EmbeddedConfig) -> None:
    """Let the source tell of a wrong path before a worker has imported torch."""
    try:
        source = importlib.import_module(config.source)
    except Exception:
        return  # the worker tells what is wrong with it
    if (check := getattr(source, "check", None)) is not None:
        check(config)


def _open_tokenizer(config: EmbeddedConfig, opening: concurrent.futures.Future[Tokenizer]) -> None:
    try:
        opening.set_result(importlib.import_module(config.source).open_tokenizer(config))
    except BaseException as error:
        opening.set_exception(error if isinstance(error, PacelineError) else _tokenizer_error(config, error))


def _tokenizer_error(config: EmbeddedConfig, error: BaseException) -> PacelineError:
    failure = ModelLoadError(
        config.model, reason=f"its tokenizer cannot be read: {portable(error)}", remedy="see the cause named"
    )
    failure.__cause__ = error
    return failure


async def _join(future: concurrent.futures.Future[Any], timeout_s: float | None) -> None:
    """Wait for a future that threads and other loops share, without cancelling it with this task."""
    if future.done():
        return
    here = asyncio.wrap_future(future)
    here.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        await asyncio.wait({here}, timeout=timeout_s)
    finally:
        here.cancel()


def _answer(call: Call) -> Item:
    """What came for a call that waited; an error is raised."""
    item = call.inbox.items.popleft()
    if isinstance(item, PacelineError):
        raise copy.copy(item)
    return item


def _result(future: concurrent.futures.Future[T]) -> T:
    """The result, or a copy of its error: one object must not be raised in many tasks."""
    error = future.exception()
    if isinstance(error, PacelineError):
        raise copy.copy(error) from error.__cause__
    return future.result()
