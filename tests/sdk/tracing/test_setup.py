"""``configure``: what arrives at a collector, and what a missing or broken one costs."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import paceline.tracing
from paceline.tracing.exporting import VALUE_LIMIT
from paceline_engine.errors import InvalidValueError, MissingExtraError, UnknownOptionError

Play = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("fresh_globals")


def test_a_turn_arrives_over_both_protocols(play: Play, receiver: Any, protocol: str) -> None:
    """Leaving the with block sends the whole tree, with the service's name and the headers given."""
    with paceline.tracing.configure(
        receiver.url, protocol=protocol, service_name="shop", headers={"X-Token": "t"}
    ) as handle:
        play(provider=None).run()
    assert handle.closed
    assert {span.name for span in receiver.spans} == {
        "invoke_agent assistant",
        "chat gemma3-270m",
        "execute_tool search",
        "paceline.decide",
        "paceline.queue",
        "paceline.prefill",
        "paceline.decode",
    }
    assert receiver.services == {"shop"}
    assert receiver.headers[0]["x-token"] == "t"
    assert receiver.value("invoke_agent assistant", "paceline.slo.met") is False


def test_flush_sends_what_has_ended(play: Play, receiver: Any, protocol: str) -> None:
    """After flush the spans are there, and tracing goes on."""
    with paceline.tracing.configure(receiver.url, protocol=protocol) as handle:
        play(provider=None).run()
        assert handle.flush()
        assert len(receiver.spans) == 7
        play(provider=None).run()
    assert len(receiver.spans) == 14
    assert receiver.services == {"paceline"}
    assert not handle.flush()


@pytest.mark.parametrize("owner", ["paceline", "application"])
def test_one_huge_value_does_no_harm(receiver: Any, protocol: str, owner: str) -> None:
    """An attribute of 8 MB beside small spans is cut; everything arrives."""
    if owner == "application":
        trace.set_tracer_provider(TracerProvider(shutdown_on_exit=False))
    huge = "x" * 8_000_000
    with paceline.tracing.configure(receiver.url, protocol=protocol):
        tracer = trace.get_tracer("app")
        tracer.start_span("small before").end()
        with tracer.start_as_current_span("huge", attributes={"text": huge, "list": [huge, "y"]}) as span:
            span.add_event("event", {"text": huge})
            span.record_exception(ValueError(huge))
            span.set_status(trace.StatusCode.ERROR, huge)
        tracer.start_span("small after").end()
    assert {span.name for span in receiver.spans} == {"small before", "huge", "small after"}
    text = receiver.value("huge", "text")
    assert len(text) <= VALUE_LIMIT
    assert text.startswith("xxx")
    assert all(request.ByteSize() < 4_000_000 for request in receiver.requests)


def test_a_batch_of_large_spans_is_sent_in_parts(receiver: Any, protocol: str) -> None:
    """Six hundred spans with 16 kB each are more than a collector takes at once, and all arrive."""
    with paceline.tracing.configure(receiver.url, protocol=protocol):
        tracer = trace.get_tracer("app")
        for index in range(600):
            tracer.start_span(f"span {index}", attributes={"text": "x" * 16_000}).end()
    assert len({span.name for span in receiver.spans}) == 600
    assert all(request.ByteSize() < 4_000_000 for request in receiver.requests)


@pytest.mark.parametrize(
    "attributes",
    [{"text": "half a pair \ud83d"}, {"number": 2**70}, {"numbers": [1, 2**70]}, {"emoji": "🎈" * 9000}],
    ids=["surrogate", "large integer", "large integer in a list", "wide text"],
)
def test_values_that_cannot_be_encoded_do_no_harm(receiver: Any, protocol: str, attributes: Any) -> None:
    """A value that protobuf refuses would take its whole batch along: it is mended instead."""
    with paceline.tracing.configure(receiver.url, protocol=protocol):
        tracer = trace.get_tracer("app")
        tracer.start_span("odd", attributes=attributes).end()
        tracer.start_span("small").end()
    assert {span.name for span in receiver.spans} == {"odd", "small"}
    assert receiver.value("odd", next(iter(attributes)))


def test_a_closed_port_costs_no_time_and_one_warning(
    play: Play, closed_port: int, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Turns take as long as ever, shutdown is bounded, and the log has one plain line."""
    handle = paceline.tracing.configure(f"http://127.0.0.1:{closed_port}", protocol=protocol, timeout_s=1.0)
    slowest_s = 0.0
    for _ in range(20):
        began = time.perf_counter()
        play(provider=None).run()
        slowest_s = max(slowest_s, time.perf_counter() - began)
    assert not handle.flush()
    play(provider=None).run()
    began = time.perf_counter()
    handle.shutdown()
    assert time.perf_counter() - began < 5.0
    assert slowest_s < 0.5
    [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.name == "paceline.tracing"
    message = record.getMessage()
    assert str(closed_port) in message
    assert ("over gRPC" if protocol == "grpc" else "over HTTP") in message
    assert f"nothing listens at port {closed_port}" in message
    # An address does not tell what listens there: the line says how to choose the other protocol.
    other = "http/protobuf" if protocol == "grpc" else "grpc"
    assert f"OTEL_EXPORTER_OTLP_PROTOCOL={other}" in message
    assert record.exc_info is None


@contextmanager
def silent_server() -> Iterator[int]:
    """Takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(16)
        yield int(server.getsockname()[1])


def left_behind() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("paceline-tracing")]


def test_a_silent_collector_does_not_hold_the_shutdown(
    play: Play, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A collector that never answers is left after the time limit, with one line then and none later."""
    with silent_server() as port:
        handle = paceline.tracing.configure(f"http://127.0.0.1:{port}", protocol=protocol, timeout_s=5.0)
        play(provider=None).run()
        began = time.perf_counter()
        handle.shutdown(timeout_s=0.3)
        assert time.perf_counter() - began < 5.0
        [told] = caplog.records
        assert "no answer within the time limit" in told.getMessage()
    for thread in left_behind():
        thread.join(30)
    assert not left_behind()
    assert caplog.records == [told]


def test_a_collector_that_comes_back_is_used_again(
    play: Play, closed_port: int, http_collector_at: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Spans that end after the collector came up arrive, and the log says that it is back."""
    caplog.set_level(logging.INFO, logger="paceline.tracing")
    url = f"http://127.0.0.1:{closed_port}"
    with paceline.tracing.configure(url, protocol="http/protobuf", timeout_s=0.5) as handle:
        play(provider=None, name="lost").run()
        assert not handle.flush(timeout_s=5)
        with http_collector_at(closed_port) as collector:
            play(provider=None, name="kept").run()
            assert handle.flush(timeout_s=5)
    assert {s.name for s in collector.spans if "agent" in s.name} == {"invoke_agent kept"}
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


PROGRAM = """
    import sys, time
    import paceline.tracing
    from opentelemetry import trace
    paceline.tracing.configure(sys.argv[1], protocol=sys.argv[2], timeout_s=1.0)
    trace.get_tracer("app").start_span("last").end()
"""


def run_program(url: str, protocol: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-W", "error", "-c", textwrap.dedent(PROGRAM), url, protocol]
    return subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)


def test_a_process_sends_what_is_left_when_it_exits(receiver: Any, protocol: str) -> None:
    """A program that never calls shutdown loses no span."""
    done = run_program(receiver.url, protocol)
    assert (done.returncode, done.stderr) == (0, "")
    assert [span.name for span in receiver.spans] == ["last"]


def test_a_process_exits_in_time_without_a_collector(closed_port: int, protocol: str) -> None:
    """With nobody listening the program ends, with one line on standard error."""
    done = run_program(f"http://127.0.0.1:{closed_port}", protocol)
    assert done.returncode == 0
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "Traceback" not in done.stderr


def test_the_newest_call_counts(play: Play, http_collector: Any, receiver: Any, protocol: str) -> None:
    """A second call shuts the first handle down and sends to the second collector, under the new name."""
    first = paceline.tracing.configure(http_collector.url, service_name="old", record_content=True)
    play(provider=None, name="one").run()
    second = paceline.tracing.configure(receiver.url, protocol=protocol, service_name="new")
    assert first.closed
    assert not second.closed
    play(provider=None, name="two").run()
    first.shutdown()
    second.shutdown()
    assert {s.name for s in http_collector.spans if "agent" in s.name} == {"invoke_agent one"}
    assert {s.name for s in receiver.spans if "agent" in s.name} == {"invoke_agent two"}
    assert (http_collector.services, receiver.services) == ({"old"}, {"new"})
    assert "gen_ai.input.messages" in str(http_collector.requests)
    assert "gen_ai.input.messages" not in str(receiver.requests)


def test_configure_works_again_after_shutdown(play: Play, http_collector: Any) -> None:
    """Spans between two set-ups are dropped; those after the second arrive."""
    paceline.tracing.configure(http_collector.url).shutdown()
    play(provider=None, name="between").run()
    with paceline.tracing.configure(http_collector.url):
        play(provider=None, name="after").run()
    assert {s.name for s in http_collector.spans if "agent" in s.name} == {"invoke_agent after"}


def test_the_applications_provider_stays(play: Play, http_collector: Any) -> None:
    """An SDK provider that is already set keeps its exporter and resource, and gets ours beside it."""
    own, kept = TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()
    own.add_span_processor(SimpleSpanProcessor(kept))
    trace.set_tracer_provider(own)
    with paceline.tracing.configure(http_collector.url, service_name="ignored"):
        play(provider=None).run()
    assert trace.get_tracer_provider() is own
    assert len(kept.get_finished_spans()) == len(http_collector.spans) == 7
    assert "ignored" not in http_collector.services
    play(provider=None).run()
    assert (len(kept.get_finished_spans()), len(http_collector.spans)) == (14, 7)


def test_a_foreign_provider_is_refused() -> None:
    """A provider that takes no exporter is named in the error, and stays."""
    foreign = trace.NoOpTracerProvider()
    trace.set_tracer_provider(foreign)
    with pytest.raises(InvalidValueError, match="NoOpTracerProvider"):
        paceline.tracing.configure("http://127.0.0.1:4317")
    assert trace.get_tracer_provider() is foreign


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the OpenTelemetry SDK configure names the extra; importing the package still works."""
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "paceline.tracing.pipeline", raising=False)
    with pytest.raises(MissingExtraError, match=r"paceline\[otlp\]"):
        paceline.tracing.configure("http://127.0.0.1:4317")


def test_tracing_imports_the_api_alone() -> None:
    """The SDK, grpc and requests are loaded by configure, not by the import."""
    program = """
        import sys
        import paceline.tracing.spans
        heavy = ("opentelemetry.sdk", "opentelemetry.exporter", "grpc", "requests", "torch")
        print([name for name in sys.modules if name.startswith(heavy)])
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


def test_bad_arguments_name_limit_and_value() -> None:
    """A time limit of 0, an unknown protocol and unknown conventions are refused before anything is set."""
    with pytest.raises(InvalidValueError, match="timeout_s must be above 0, got 0"):
        paceline.tracing.configure(timeout_s=0)
    with pytest.raises(UnknownOptionError, match="thrift"):
        paceline.tracing.configure(protocol="thrift")
    with pytest.raises(UnknownOptionError, match="'operation', 'inference'"):
        paceline.tracing.configure(conventions="next")
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
