"""A turn with made-up times, and providers that belong to one test."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import opentelemetry.metrics._internal as metrics_internal
import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.util._once import Once

from paceline.report import GenerationRecord, Report, Verdict
from paceline.tracing.spans import ChatSpan, TurnSpan, start_turn
from paceline_engine.backends.base import ModelInfo
from paceline_engine.chunk import Usage
from paceline_engine.mode import Drafter, Mode, Speculation, Variant
from paceline_engine.plan import Plan
from paceline_engine.request import GenerationRequest, Prompt, SamplingParams
from paceline_engine.timeline import Phase, StepTime, Timeline, TimelineEvent, TokenTime
from paceline_policies.decision import Candidate, Decision, Estimate, Prediction
from paceline_policies.slo import SLO

SECRET_PROMPT = "zebra-prompt-7781 about the merger"
SECRET_ANSWER = "walrus-answer-4410 is the password"
SECRET_STOP = "ocelot-stop-3319"

MODEL = ModelInfo(
    name="gemma3-270m",
    fingerprint="f",
    context_tokens=2048,
    vocab_size=262144,
    variants=(Variant.BF16, Variant.INT8, Variant.INT4),
)
FAST = Mode(
    variant=Variant.INT8,
    speculation=Speculation(drafter=Drafter.NGRAM, max_draft_tokens=4),
)
BEST = Mode(variant=Variant.BF16)


def prediction(ttft_ms: float, tpot_ms: float, e2e_ms: float) -> Prediction:
    def around(value: float) -> Estimate:
        return Estimate(p50_ms=value, p90_ms=value * 1.2)

    return Prediction(ttft=around(ttft_ms), tpot=around(tpot_ms), e2e=around(e2e_ms))


def decision() -> Decision:
    chosen = Candidate(
        backend="embedded",
        mode=FAST,
        prediction=prediction(150, 20, 900),
        quality=0.998,
        p_meet=0.93,
        max_tokens=40,
        chosen=True,
        reason="the best quality that fits",
    )
    rejected = replace(
        chosen,
        mode=BEST,
        prediction=prediction(400, 60, 2800),
        quality=1.0,
        p_meet=0.02,
        chosen=False,
        reason="ttft p90 480 ms is 280 ms over 200 ms",
    )
    return Decision(
        backend="embedded",
        plan=Plan(mode=FAST, max_tokens=40),
        feasible=True,
        action="run",
        prediction=chosen.prediction,
        candidates=(rejected, chosen),
    )


def timeline(start_s: float) -> Timeline:
    """Queue of 50 ms, prefill of 250 ms, then 5 tokens 40 ms apart, each taken 1 ms after it was made."""
    made = [start_s + 0.3 + 0.04 * index for index in range(5)]
    return Timeline(
        mode=FAST,
        submitted_at_s=start_s,
        started_at_s=start_s + 0.05,
        tokens=tuple(TokenTime(made_at_s=at, delivered_at_s=at + 0.001) for at in made),
        finished_at_s=made[-1],
        steps=(
            StepTime(
                started_at_s=start_s + 0.05,
                ended_at_s=start_s + 0.3,
                variant=Variant.INT8,
                prefill_tokens=60,
                decode_tokens=0,
                n_sequences=1,
                context_tokens=60,
                attended_pairs=1830,
            ),
        ),
        events=(
            TimelineEvent(
                at_s=start_s + 0.35, name="mode", attributes={"from": "int8", "to": "int4", "odd": object()}
            ),
            TimelineEvent(at_s=start_s + 0.02, name="paceline.preempted"),
        ),
        prompt_tokens=100,
        cached_tokens=40,
    )


@dataclass
class Played:
    """A turn that is played to the recorder, with times that a real one might have had."""

    slo: SLO = field(default_factory=lambda: SLO(ttft_ms=200, tpot_ms=30, e2e_ms=400))
    provider: TracerProvider | None = None
    name: str = "assistant"
    started_at_s: float = field(default_factory=lambda: time.monotonic() - 1.0)
    request_id: str = "r1"

    def begin(self) -> TurnSpan:
        return start_turn(
            self.name, slo=self.slo, started_at_s=self.started_at_s, tracer_provider=self.provider
        )

    def request(self, **changes: Any) -> GenerationRequest:
        messages = ({"role": "user", "content": SECRET_PROMPT},)
        request = GenerationRequest(
            id=self.request_id,
            prompt=Prompt(messages=messages, token_ids=(1, 2), n_tokens=100),
            sampling=SamplingParams(temperature=0.5, top_p=0.9, top_k=20, seed=7),
            stop=(SECRET_STOP,),
        )
        return replace(request, **changes)

    def chat(self, turn: TurnSpan, request: Any = None) -> ChatSpan:
        request = self.request() if request is None else request
        chat = turn.start_chat(
            request,
            model=MODEL,
            backend="embedded",
            started_at_s=self.started_at_s + 0.01,
            messages=request.prompt.messages,
        )
        chat.decided(decision(), started_at_s=self.started_at_s + 0.01, ended_at_s=self.started_at_s + 0.02)
        return chat

    def record(self, **changes: Any) -> GenerationRecord:
        record = GenerationRecord(
            id=self.request_id,
            kind="chat",
            decision=decision(),
            timeline=timeline(self.started_at_s + 0.02),
            usage=Usage(prompt_tokens=100, completion_tokens=5, cached_tokens=40),
            finish_reason="stop",
        )
        return replace(record, **changes)

    def report(self, *records: GenerationRecord) -> Report:
        start = self.started_at_s
        return Report(
            name=self.name,
            trace_id=None,
            slo=self.slo,
            started_at_s=start,
            ended_at_s=start + 0.6,
            generations=records,
            phases=(
                Phase(name="queue", started_at_s=start + 0.02, ended_at_s=start + 0.07),
                Phase(name="prefill", started_at_s=start + 0.07, ended_at_s=start + 0.32),
                Phase(name="decode", started_at_s=start + 0.32, ended_at_s=start + 0.48),
                Phase(name="tool", started_at_s=start + 0.5, ended_at_s=start + 0.6),
            ),
            verdicts=(
                Verdict(budget="ttft", limit_ms=200, measured_ms=311, met=False, blame="prefill"),
                Verdict(budget="tpot", limit_ms=30, measured_ms=40, met=False, blame="decode"),
                Verdict(
                    budget="e2e", limit_ms=400, measured_ms=600, met=False, blame="tool", detail="search"
                ),
            ),
        )

    def run(self, *, error: BaseException | None = None) -> TurnSpan:
        """The whole turn: one model call and one tool."""
        turn = self.begin()
        chat = self.chat(turn)
        record = self.record()
        chat.end(record, output_text=SECRET_ANSWER)
        tool = turn.start_tool(
            "search",
            started_at_s=self.started_at_s + 0.5,
            attributes={"arguments": SECRET_PROMPT, "hits": 3, "index": "news"},
        )
        tool.end(ended_at_s=self.started_at_s + 0.6)
        turn.end(self.report(record), error=error)
        return turn


@dataclass
class Captured:
    """The spans that a provider of this test's own exported."""

    provider: TracerProvider
    exporter: InMemorySpanExporter

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()

    def named(self, name: str) -> ReadableSpan:
        [span] = [span for span in self.spans if span.name == name]
        return span

    def children(self, name: str) -> list[str]:
        parent = self.named(name).context
        assert parent is not None
        return sorted(
            span.name
            for span in self.spans
            if span.parent is not None and span.parent.span_id == parent.span_id
        )


@pytest.fixture
def captured() -> Iterator[Captured]:
    """A provider with an in-memory exporter, apart from the process's own."""
    provider, exporter = TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield Captured(provider, exporter)
    provider.shutdown()


@pytest.fixture
def play(captured: Captured) -> Callable[..., Played]:
    """Make a turn to be played to ``captured``."""

    def make(**changes: Any) -> Played:
        return Played(**({"provider": captured.provider} | changes))

    return make


@pytest.fixture
def secrets() -> tuple[str, ...]:
    """Texts of prompt, answer and stop string, of which nothing may be exported by default."""
    return SECRET_PROMPT, SECRET_ANSWER, SECRET_STOP


class Receiver:
    """An OTLP collector on loopback that keeps what it gets."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.metric_requests: list[ExportMetricsServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    @property
    def services(self) -> set[str]:
        return {
            attribute.value.string_value
            for request in self.requests
            for resource in request.resource_spans
            for attribute in resource.resource.attributes
            if attribute.key == "service.name"
        }

    def value(self, name: str, key: str) -> Any:
        """An attribute of the one span with this name."""
        [span] = [span for span in self.spans if span.name == name]
        [found] = [attribute.value for attribute in span.attributes if attribute.key == key]
        return getattr(found, found.WhichOneof("value"))


@contextmanager
def http_receiver(port: int = 0) -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/traces":
                receiver.requests.append(ExportTraceServiceRequest.FromString(body))
            elif self.path == "/v1/metrics":
                receiver.metric_requests.append(ExportMetricsServiceRequest.FromString(body))
            receiver.headers.append({key.lower(): value for key, value in self.headers.items()})
            self.send_response(200 if self.path.startswith("/v1/") else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_args: Any) -> None:
            """Keep the test's output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    receiver.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def grpc_receiver() -> Iterator[Receiver]:
    """With gRPC's default limit of 4 MiB for a message, as collectors have it."""
    receiver = Receiver()

    class Traces(TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
            receiver.requests.append(request)
            receiver.headers.append(dict(context.invocation_metadata()))
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(Traces(), server)
    receiver.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None).wait()


@pytest.fixture(params=["grpc", "http/protobuf"])
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def receiver(protocol: str) -> Iterator[Receiver]:
    """A collector that speaks ``protocol``."""
    with grpc_receiver() if protocol == "grpc" else http_receiver() as made:
        yield made


@pytest.fixture
def http_collector() -> Iterator[Receiver]:
    with http_receiver() as made:
        yield made


@pytest.fixture
def http_collector_at() -> Callable[[int], AbstractContextManager[Receiver]]:
    """Start a collector on a given port."""
    return http_receiver


@pytest.fixture
def fresh_globals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The state of a process that has set no OpenTelemetry provider yet."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER_SET_ONCE", Once())
    monkeypatch.setattr(metrics_internal, "_METER_PROVIDER", None)
    monkeypatch.setattr(metrics_internal, "_METER_PROVIDER_SET_ONCE", Once())
    monkeypatch.setattr(metrics_internal, "_PROXY_METER_PROVIDER", metrics_internal._ProxyMeterProvider())
    yield
    for provider in (trace._TRACER_PROVIDER, metrics_internal._METER_PROVIDER):
        if hasattr(provider, "shutdown"):
            provider.shutdown()


@pytest.fixture
def closed_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])
