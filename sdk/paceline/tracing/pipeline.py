"""Providers, processors and exporters of the OpenTelemetry SDK, put together for one collector.

Needs the extra ``otlp``; imported only by ``paceline.tracing.configure``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

from opentelemetry import metrics as metrics_api
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from paceline.tracing.endpoint import Target
from paceline.tracing.exporting import VALUE_LIMIT, Quiet, SafeMetricExporter, SafeSpanExporter
from paceline.tracing.settings import Settings, bind
from paceline_engine.errors import InvalidValueError

_SERVICE = "service.name"
_ATTRIBUTE = "_paceline_switch"
_METRICS_ATTRIBUTE = "_paceline_exporter"

_logger = logging.getLogger("paceline.tracing")


class Switch(SpanProcessor):
    """The one processor that a tracer provider gets from Paceline; it leads to the newest pipeline.

    A provider takes processors but never gives one back, so this one stays and what is behind it changes.
    """

    def __init__(self, provider: TracerProvider, *, owned: bool) -> None:
        self.provider = provider
        self.owned = owned
        """Paceline made the provider, so its resource is Paceline's to name."""
        self.pipeline: Pipeline | None = None

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing is done before a span has ended."""

    def on_end(self, span: ReadableSpan) -> None:
        if (pipeline := self.pipeline) is not None:
            pipeline.processor.on_end(span)

    def shutdown(self) -> None:
        if (pipeline := self.pipeline) is not None:
            pipeline.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        pipeline = self.pipeline
        return True if pipeline is None else pipeline.processor.force_flush(timeout_millis)


class Pipeline:
    """Batches, exporters and their limits for one collector."""

    def __init__(
        self,
        target: Target,
        *,
        switch: Switch,
        settings: Settings,
        service_name: str | None,
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> None:
        self._target = target
        self._switch = switch
        self._headers = dict(headers)
        self._timeout_s = timeout_s
        self._quiet = Quiet(target.traces_url, protocol=target.protocol)
        self._exporter = SafeSpanExporter(
            _span_exporter(target, self._headers, timeout_s),
            quiet=self._quiet,
            resource=_renamed(switch, service_name),
        )
        self.processor = BatchSpanProcessor(self._exporter)
        self.shutdown: Callable[[], None] = self.abort
        """What ends it in good order: its handle's, once there is one."""
        self._meters: MeterProvider | None = None
        self._metric_exporter: SafeMetricExporter | None = None
        bind(switch.provider, settings)
        switch.pipeline = self

    @property
    def down(self) -> bool:
        """The latest request failed."""
        return self._quiet.down

    def add_metrics(self, service_name: str | None) -> None:
        """Send metrics too, unless the application has set a meter provider of its own."""
        provider = metrics_api.get_meter_provider()
        exporter = getattr(provider, _METRICS_ATTRIBUTE, None)
        if not isinstance(provider, MeterProvider):
            exporter = SafeMetricExporter()
            provider = MeterProvider(
                resource=_resource(service_name),
                metric_readers=[PeriodicExportingMetricReader(exporter)],
                shutdown_on_exit=False,
            )
            setattr(provider, _METRICS_ATTRIBUTE, exporter)
            metrics_api.set_meter_provider(provider)
        if not isinstance(exporter, SafeMetricExporter):
            _logger.info("the application's meter provider stays as it is, and takes Paceline's metrics too")
            return
        exporter.connect(_metric_exporter(self._target, self._headers, self._timeout_s), self._quiet)
        self._meters, self._metric_exporter = provider, exporter

    def flush(self) -> None:
        """Send everything that has ended; takes as long as the exporters' own limits allow."""
        self.processor.force_flush()
        if self._meters is not None:
            self._meters.force_flush()

    def close(self) -> None:
        """Flush and end. Runs on a thread that may be left behind."""
        if self._meters is not None:
            self._meters.force_flush()
        self.processor.shutdown()  # type: ignore[no-untyped-call, unused-ignore]
        self.abort()
        self._quiet.unmute()

    def give_up(self) -> None:
        """Tell that what is still on its way is left, before ``abort``."""
        self._quiet.give_up()

    def abort(self) -> None:
        """End at once, without what is still queued."""
        if self._switch.pipeline is self:
            self._switch.pipeline = None
            bind(self._switch.provider, None)
        self._exporter.shutdown()
        if self._metric_exporter is not None:
            self._metric_exporter.disconnect()
            self._metric_exporter = None


def switch(service_name: str | None) -> Switch:
    """The switch on the application's tracer provider, or on one that is set now.

    Raises:
        InvalidValueError: the application's provider takes no processors.
    """
    provider = trace.get_tracer_provider()
    if isinstance(found := getattr(provider, _ATTRIBUTE, None), Switch):
        return found
    owned = isinstance(provider, trace.ProxyTracerProvider)
    if owned:
        limits = SpanLimits()
        if limits.max_attribute_length is None:
            limits = SpanLimits(max_attribute_length=VALUE_LIMIT)
        provider = TracerProvider(
            resource=_resource(service_name), span_limits=limits, shutdown_on_exit=False
        )
        trace.set_tracer_provider(provider)
    if not isinstance(provider, TracerProvider):
        raise InvalidValueError(
            "tracer provider",
            observed=type(provider).__name__,
            limit="one of the OpenTelemetry SDK, or none",
            remedy="add an exporter to that provider: Paceline traces through it without configure",
        )
    made = Switch(provider, owned=owned)
    provider.add_span_processor(made)
    setattr(provider, _ATTRIBUTE, made)
    return made


def _resource(service_name: str | None) -> Resource:
    resource = Resource.create({} if service_name is None else {_SERVICE: service_name})
    named = service_name is not None or os.environ.get("OTEL_SERVICE_NAME")
    if named or f"{_SERVICE}=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        return resource
    return resource.merge(Resource({_SERVICE: "paceline"}))


def _renamed(switch: Switch, service_name: str | None) -> Resource | None:
    """What to merge into the resource of spans, where an earlier call named the service otherwise."""
    if not switch.owned:
        return None
    wanted = _resource(service_name)
    same = wanted.attributes.get(_SERVICE) == switch.provider.resource.attributes.get(_SERVICE)
    return None if same else Resource({_SERVICE: wanted.attributes[_SERVICE]})


def _span_exporter(target: Target, headers: dict[str, str], timeout_s: float) -> SpanExporter:
    if target.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc(
            endpoint=target.traces_url,
            insecure=target.insecure,
            headers=headers or None,
            timeout=timeout_s,  # type: ignore[arg-type, unused-ignore]
        )
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    return Http(endpoint=target.traces_url, headers=headers or None, timeout=timeout_s)  # type: ignore[arg-type, unused-ignore]


def _metric_exporter(target: Target, headers: dict[str, str], timeout_s: float) -> MetricExporter:
    if target.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as Grpc

        return Grpc(
            endpoint=target.metrics_url,
            insecure=target.insecure,
            headers=headers or None,
            timeout=timeout_s,  # type: ignore[arg-type, unused-ignore]
        )
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as Http

    return Http(endpoint=target.metrics_url, headers=headers or None, timeout=timeout_s)  # type: ignore[arg-type, unused-ignore]
