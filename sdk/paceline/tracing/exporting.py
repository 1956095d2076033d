"""An exporter around an OTLP exporter, so that neither a span nor a collector can do harm.

* One oversized, unencodable or out-of-range value would get a whole batch rejected: values are cut and
  mended span by span, and a batch is sent in parts below the size that collectors accept.
* A collector that is down would fill the log with a line or a traceback for each batch: one warning is
  logged when it goes and one line when it is back.

Needs the OpenTelemetry SDK; imported only by ``paceline.tracing.configure``.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.util.types import AttributeValue

from paceline.tracing.content import shorten
from paceline.tracing.endpoint import Protocol

VALUE_LIMIT = 16_384
"""Most characters of one attribute value."""
_REQUEST_LIMIT_BYTES = 2 * 1024 * 1024
"""Collectors take 4 MiB over gRPC by default; the rest is room for what the estimate leaves out."""
_SPAN_OVERHEAD_BYTES = 256
_VALUE_OVERHEAD_BYTES = 32
_CONNECT_S = 0.5
_INT64 = range(-(2**63), 2**63)

_logger = logging.getLogger("paceline.tracing")

_SPOKEN: Mapping[Protocol, str] = {"grpc": "gRPC", "http/protobuf": "HTTP"}


def _hint(protocol: Protocol) -> str:
    """What to set where the collector speaks the other protocol, which only its owner knows."""
    other: Protocol = "http/protobuf" if protocol == "grpc" else "grpc"
    prefix = " or an endpoint that begins with grpc://" if other == "grpc" else ""
    return (
        f"If it expects {_SPOKEN[other]}, set OTEL_EXPORTER_OTLP_PROTOCOL={other}, or pass "
        f"protocol={other!r} to configure(){prefix}"
    )


def _without_a_reason(endpoint: str) -> str:
    """What to look at where the exporter only said that it failed. Runs beside the turns."""
    found = urlsplit(endpoint)
    port = found.port or (443 if found.scheme == "https" else 80)
    try:
        with socket.create_connection((found.hostname or "", port), timeout=_CONNECT_S):
            return "see the collector's log"
    except ConnectionRefusedError:
        return f"nothing listens at port {port}: is it started?"
    except OSError as error:
        return f"it cannot be reached: {error}"


class Quiet:
    """Runs exports with the exporters' own logging held back, and tells once when the state changes."""

    def __init__(self, endpoint: str, *, protocol: Protocol) -> None:
        self._endpoint = endpoint
        self._protocol: Protocol = protocol
        self._exporting = threading.local()
        self._lock = threading.Lock()
        self._down = False
        self._ended = False
        self._muted: list[logging.Logger] = []

    @property
    def down(self) -> bool:
        """The latest export failed."""
        return self._down

    def mute(self, exporter: object) -> None:
        """Hold back what the exporter's modules log while ``run`` runs on the same thread."""
        modules = {kind.__module__ for kind in type(exporter).__mro__}
        for name in sorted(modules | {"opentelemetry.exporter.otlp.common.http"}):
            if name.startswith("opentelemetry.exporter"):
                logger = logging.getLogger(name)
                logger.addFilter(self._passes)
                self._muted.append(logger)

    def unmute(self) -> None:
        for logger in self._muted:
            logger.removeFilter(self._passes)
        self._muted.clear()

    def give_up(self) -> None:
        """Tell that a request outlived the time limit, and nothing later: its thread is left behind."""
        self._tell(False, "spans", "no answer within the time limit")
        with self._lock:
            self._ended = True

    def run(self, export: Callable[[], bool], what: str) -> bool:
        """Whether the export succeeded; no exception leaves here."""
        self._exporting.active = True
        reason = ""
        try:
            succeeded = export()
        except Exception as error:
            succeeded, reason = False, f"{type(error).__name__}: {error}"
        finally:
            self._exporting.active = False
        self._tell(succeeded, what, reason)
        return succeeded

    def _tell(self, succeeded: bool, what: str, reason: str) -> None:
        with self._lock:
            changed = self._down is succeeded and not self._ended
            self._down = not succeeded
        if changed and succeeded:
            _logger.info("the collector at %s takes %s again", self._endpoint, what)
        elif changed:
            reason = reason or _without_a_reason(self._endpoint)
            _logger.warning(
                "the collector at %s takes no %s over %s, so they are dropped until it does (%s). %s",
                self._endpoint,
                what,
                _SPOKEN[self._protocol],
                reason,
                _hint(self._protocol),
            )

    def _passes(self, _record: logging.LogRecord) -> bool:
        return not getattr(self._exporting, "active", False)


class SafeSpanExporter(SpanExporter):
    """Sends batches in acceptable parts of acceptable spans."""

    def __init__(self, inner: SpanExporter, *, quiet: Quiet, resource: Resource | None) -> None:
        self._inner = inner
        self._quiet = quiet
        self._resource = resource
        self._closed = threading.Event()
        quiet.mute(inner)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        succeeded = True
        for part in _parts([safe_span(span, self._resource) for span in spans]):
            if self._closed.is_set():
                return SpanExportResult.FAILURE
            succeeded &= self._quiet.run(partial(self._send, part), "spans")
        return SpanExportResult.SUCCESS if succeeded else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        """End at once: a retry that waits is woken, and nothing more is sent. Later calls do nothing."""
        if not self._closed.is_set():
            self._closed.set()
            self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True

    def _send(self, spans: Sequence[ReadableSpan]) -> bool:
        return self._inner.export(spans) is SpanExportResult.SUCCESS


class SafeMetricExporter(MetricExporter):
    """Leads to the newest OTLP exporter, with the log kept quiet; metrics are dropped where there is none.

    A metric reader never changes its exporter, so this one stays and what is behind it changes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._connected: tuple[MetricExporter, Quiet] | None = None

    def connect(self, inner: MetricExporter, quiet: Quiet) -> None:
        quiet.mute(inner)
        self._connected = inner, quiet

    def disconnect(self) -> None:
        connected, self._connected = self._connected, None
        if connected is not None:
            connected[0].shutdown()

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        if (connected := self._connected) is None:
            return MetricExportResult.FAILURE
        inner, quiet = connected

        def send() -> bool:
            result = inner.export(metrics_data, timeout_millis=timeout_millis, **kwargs)
            return result is MetricExportResult.SUCCESS

        return MetricExportResult.SUCCESS if quiet.run(send, "metrics") else MetricExportResult.FAILURE

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        self.disconnect()


def safe_span(span: ReadableSpan, resource: Resource | None) -> ReadableSpan:
    """The span with every value within the limits; itself where nothing is to be mended."""
    name = _safe(span.name)
    attributes = _safe_all(span.attributes)
    events = [_safe_event(event) for event in span.events]
    status = span.status
    description = None if status.description is None else _safe(status.description)
    unchanged = (
        name is span.name
        and attributes is span.attributes
        and description is status.description
        and all(mended is event for mended, event in zip(events, span.events, strict=True))
    )
    if unchanged and resource is None:
        return span
    return ReadableSpan(
        name=str(name),
        context=span.context,
        parent=span.parent,
        resource=span.resource if resource is None else span.resource.merge(resource),
        attributes=attributes,
        events=events,
        links=span.links,
        kind=span.kind,
        status=status
        if description is status.description
        else type(status)(status.status_code, str(description)),
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )


def _safe_event(event: Event) -> Event:
    name, attributes = _safe(event.name), _safe_all(event.attributes)
    if name is event.name and attributes is event.attributes:
        return event
    return Event(str(name), attributes, event.timestamp)


def _safe_all(attributes: Mapping[str, AttributeValue] | None) -> Mapping[str, AttributeValue] | None:
    """The attributes themselves, or a mended copy."""
    if not attributes:
        return attributes
    mended = {key: _safe(value) for key, value in attributes.items()}
    return attributes if all(mended[key] is value for key, value in attributes.items()) else mended


def _safe(value: Any) -> Any:
    """The value itself, or one that fits: protobuf takes valid UTF-8 and 64-bit integers alone."""
    if isinstance(value, str):
        if len(value) > VALUE_LIMIT:
            value = shorten(value, VALUE_LIMIT)
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-8", "replace").decode()
        return value
    if isinstance(value, bytes):
        return value[:VALUE_LIMIT]
    if isinstance(value, int) and value not in _INT64:
        return str(value)
    if isinstance(value, list | tuple):
        mended = [_safe(item) for item in value[:VALUE_LIMIT]]
        same = len(mended) == len(value) and all(a is b for a, b in zip(mended, value, strict=True))
        return value if same else _same_kind(mended)
    if isinstance(value, Mapping):
        return {str(key)[:VALUE_LIMIT]: _safe(item) for key, item in value.items()}
    return value


def _same_kind(items: list[Any]) -> list[Any]:
    """A sequence must hold one type: where one number became text, all of them do."""
    return [str(item) for item in items] if any(isinstance(item, str) for item in items) else items


def _parts(spans: Sequence[ReadableSpan]) -> Iterator[list[ReadableSpan]]:
    """The spans in order, in parts of about ``_REQUEST_LIMIT_BYTES`` at most."""
    part: list[ReadableSpan] = []
    size = 0
    for span in spans:
        span_size = _size(span)
        if part and size + span_size > _REQUEST_LIMIT_BYTES:
            yield part
            part, size = [], 0
        part.append(span)
        size += span_size
    if part:
        yield part


def _size(span: ReadableSpan) -> int:
    """About how many bytes the span takes in a request."""
    held = [span.attributes, *(event.attributes for event in span.events)]
    held += [link.attributes for link in span.links]
    return _SPAN_OVERHEAD_BYTES + sum(
        len(key) + _value_size(value) for attributes in held for key, value in (attributes or {}).items()
    )


def _value_size(value: Any) -> int:
    if isinstance(value, str):
        # Characters beyond ASCII take up to four bytes.
        return _VALUE_OVERHEAD_BYTES + (len(value) if value.isascii() else 4 * len(value))
    if isinstance(value, list | tuple):
        return _VALUE_OVERHEAD_BYTES + sum(_value_size(item) for item in value)
    return _VALUE_OVERHEAD_BYTES + (len(value) if isinstance(value, bytes) else 0)
