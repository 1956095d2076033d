"""``configure``: send traces to an OTLP collector such as Jaeger, with one call."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

from paceline.tracing.endpoint import Target, resolve
from paceline.tracing.names import Conventions
from paceline.tracing.settings import Settings
from paceline_engine.errors import InvalidValueError, MissingExtraError, UnknownOptionError

if TYPE_CHECKING:
    from paceline.tracing.pipeline import Pipeline


class TracingHandle:
    """What ``configure`` set up. Ends at ``shutdown``, at the end of a ``with`` block or of the process."""

    def __init__(self, pipeline: Pipeline, *, target: Target, timeout_s: float) -> None:
        self.endpoint = target.traces_url
        self.protocol = target.protocol
        self._pipeline = pipeline
        self._timeout_s = timeout_s
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._told = threading.Event()
        self._closed = threading.Event()
        # Ready before it is needed: a thread cannot be started any more while the interpreter exits.
        self._start_closer()
        atexit.register(self.shutdown)

    @property
    def closed(self) -> bool:
        return self._told.is_set()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Send what has ended so far, within the time limit; True where the collector took all of it."""
        if self.closed:
            return False
        return self._run_apart(self._pipeline.flush, self._limit(timeout_s)) and not self._pipeline.down

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Send what is left, within the time limit, and end. Later calls do nothing.

        Turns may go on after it: their spans are dropped.
        """
        with self._lock:
            if self._told.is_set():
                return
            self._told.set()
        atexit.unregister(self.shutdown)
        if os.getpid() != self._pid:
            # A forked child has the exporter, but not its parent's thread.
            self._start_closer()
        if not self._closed.wait(self._limit(timeout_s)):
            self._pipeline.give_up()
            # Some releases of the exporters wait for a running request even here.
            self._run_apart(self._pipeline.abort, limit_s=1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _limit(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else timeout_s

    @staticmethod
    def _run_apart(work: Callable[[], None], limit_s: float) -> bool:
        """Whether the work was done in time; if not, its thread is left behind."""
        worker = threading.Thread(target=work, name="paceline-tracing-work", daemon=True)
        try:
            worker.start()
        except RuntimeError:
            return False  # the interpreter exits, and takes what still runs with it
        worker.join(limit_s)
        return not worker.is_alive()

    def _start_closer(self) -> None:
        with suppress(RuntimeError):
            threading.Thread(target=self._close_when_told, name="paceline-tracing", daemon=True).start()

    def _close_when_told(self) -> None:
        self._told.wait()
        try:
            self._pipeline.close()
        finally:
            self._closed.set()


def configure(
    endpoint: str | None = None,
    *,
    protocol: str | None = None,
    service_name: str | None = None,
    headers: Mapping[str, str] | None = None,
    record_content: bool | None = None,
    metrics: bool = False,
    conventions: Conventions | str | None = None,
    timeout_s: float = 5.0,
) -> TracingHandle:
    """Send traces to an OTLP collector; needs the extra ``otlp``.

    Where the application has set no tracer provider, one is set. Where it has set one of the OpenTelemetry
    SDK, that one stays and gets a second exporter: the application's own spans are sent here too, with the
    application's resource, and ``service_name`` is not used. Called again, the newest call counts: the
    earlier handle is shut down and its exporter replaced.

    Args:
        endpoint: ``http://localhost:4317``, for example; see ``paceline.tracing.endpoint.resolve`` for the
            other forms and the environment variables.
        protocol: ``grpc`` or ``http/protobuf``; by default worked out from the endpoint.
        service_name: by default OTEL_SERVICE_NAME, else ``paceline``.
        headers: sent with every request, for a token say.
        record_content: record messages, answers, stop strings, tool arguments and exceptions' messages. By
            default only where OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT says so.
        metrics: send metrics too. Jaeger does not take any; an OpenTelemetry collector does.
        conventions: ``operation`` or ``inference``, the names of the metrics; by default ``operation``,
            unless OTEL_SEMCONV_STABILITY_OPT_IN lists ``gen_ai_latest_experimental``.
        timeout_s: longest time for one request, and for ``flush`` and ``shutdown``. No turn waits for it.

    Raises:
        MissingExtraError: the extra is not installed.
        InvalidValueError: an argument is not allowed, or the application's tracer provider takes no exporter.
    """
    if not timeout_s > 0:
        raise InvalidValueError("timeout_s", observed=timeout_s, limit="above 0", remedy="5 is usual")
    target = resolve(endpoint, protocol)
    settings = _settings(record_content, conventions)
    try:
        from paceline.tracing.pipeline import Pipeline, switch
    except ImportError as error:
        raise MissingExtraError("otlp", needed_for="paceline.tracing.configure") from error
    lead = switch(service_name)
    if lead.pipeline is not None:
        lead.pipeline.shutdown()
    pipeline = Pipeline(
        target,
        switch=lead,
        settings=settings,
        service_name=service_name,
        headers={key.lower(): value for key, value in (headers or {}).items()},
        timeout_s=timeout_s,
    )
    if metrics:
        pipeline.add_metrics(service_name)
    handle = TracingHandle(pipeline, target=target, timeout_s=timeout_s)
    pipeline.shutdown = handle.shutdown
    return handle


def _settings(record_content: bool | None, conventions: Conventions | str | None) -> Settings:
    """The arguments, and the environment where they are left out."""
    found = Settings.from_environment()
    if record_content is not None:
        found = replace(found, record_content=record_content)
    if conventions is None:
        return found
    try:
        return replace(found, conventions=Conventions(conventions))
    except ValueError:
        raise UnknownOptionError(
            "conventions",
            observed=conventions,
            limit=f"one of {', '.join(repr(str(known)) for known in Conventions)}",
            remedy="leave it out to follow OTEL_SEMCONV_STABILITY_OPT_IN",
        ) from None
