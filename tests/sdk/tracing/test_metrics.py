"""Metrics of calls and verdicts, under both states of the conventions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

import paceline.tracing
from paceline.tracing.names import Conventions
from paceline.tracing.settings import Settings, bind

Play = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("fresh_globals")

DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)


@pytest.fixture
def reader() -> InMemoryMetricReader:
    """The process's meter provider, read in memory."""
    made = InMemoryMetricReader()
    metrics.set_meter_provider(MeterProvider(metric_readers=[made], shutdown_on_exit=False))
    return made


def read(reader: InMemoryMetricReader) -> dict[str, list[Any]]:
    data = reader.get_metrics_data()
    assert data is not None
    return {
        metric.name: list(metric.data.data_points)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def test_a_turn_is_measured_with_the_operation_names(play: Play, reader: InMemoryMetricReader) -> None:
    """By default the names are those that dashboards know, with the conventions' buckets."""
    play().run()
    found = read(reader)
    assert set(found) == {
        "gen_ai.client.operation.duration",
        "gen_ai.client.operation.time_to_first_chunk",
        "gen_ai.client.operation.time_per_output_chunk",
        "gen_ai.client.token.usage",
        "paceline.slo.verdicts",
    }
    [duration] = found["gen_ai.client.operation.duration"]
    assert duration.sum == pytest.approx(0.471)
    assert duration.explicit_bounds == pytest.approx(DURATION_BUCKETS)
    assert duration.attributes["gen_ai.request.model"] == "gemma3-270m"
    [first] = found["gen_ai.client.operation.time_to_first_chunk"]
    assert first.sum == pytest.approx(0.311)
    [gaps] = found["gen_ai.client.operation.time_per_output_chunk"]
    assert (gaps.count, gaps.sum) == (4, pytest.approx(0.16))
    tokens = {
        point.attributes["gen_ai.token.type"]: point.sum for point in found["gen_ai.client.token.usage"]
    }
    assert tokens == {"input": 100, "output": 5}
    assert found["gen_ai.client.token.usage"][0].explicit_bounds[:3] == (1, 4, 16)


def test_verdicts_are_counted_by_budget_and_blame(play: Play, reader: InMemoryMetricReader) -> None:
    """Each verdict of each turn counts once, with its budget, whether it was met and the phase to blame."""
    play().run()
    play().run()
    counted = {
        (
            point.attributes["paceline.slo.budget"],
            point.attributes["paceline.slo.met"],
            point.attributes["paceline.slo.blame"],
        ): point.value
        for point in read(reader)["paceline.slo.verdicts"]
    }
    assert counted == {("ttft", False, "prefill"): 2, ("tpot", False, "decode"): 2, ("e2e", False, "tool"): 2}


def test_the_switch_gives_the_inference_names(
    play: Play, captured: Any, reader: InMemoryMetricReader
) -> None:
    """The other state of the conventions has other names, and counters in place of the token histogram."""
    bind(captured.provider, Settings(conventions=Conventions.INFERENCE))
    play().run()
    found = read(reader)
    assert "gen_ai.client.inference.duration" in found
    assert "gen_ai.client.inference.time_to_first_chunk" in found
    assert "gen_ai.client.inference.time_per_output_chunk" in found
    assert not any("operation" in name or "token.usage" in name for name in found)
    [cached] = found["gen_ai.client.inference.usage.cache_read.input_tokens"]
    assert cached.value == 40
    assert cached.attributes["gen_ai.token.modality"] == "text"


def test_the_environment_moves_the_switch() -> None:
    """OTEL_SEMCONV_STABILITY_OPT_IN decides, among what else it lists."""
    variable = "OTEL_SEMCONV_STABILITY_OPT_IN"
    assert Conventions.from_environment({}) is Conventions.OPERATION
    assert Conventions.from_environment({variable: "http"}) is Conventions.OPERATION
    listed = {variable: "http, gen_ai_latest_experimental"}
    assert Conventions.from_environment(listed) is Conventions.INFERENCE


def test_calls_are_measured_without_a_tracer_provider(play: Play, reader: InMemoryMetricReader) -> None:
    """An application that only set up metrics gets them, with the error's type where a call failed."""
    played = play(provider=None)
    turn = played.begin()
    chat = played.chat(turn)
    chat.end(played.record(finish_reason=None), error=ValueError("x"))
    turn.end(played.report())
    [duration] = read(reader)["gen_ai.client.operation.duration"]
    assert duration.attributes["error.type"] == "ValueError"


def test_configure_sends_metrics_when_asked(play: Play, http_collector: Any) -> None:
    """With metrics=True the collector gets both signals; called again they go to the same place."""
    for _ in range(2):
        with paceline.tracing.configure(http_collector.url, metrics=True):
            play(provider=None).run()
    names = {
        metric.name
        for request in http_collector.metric_requests
        for resource in request.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert "gen_ai.client.operation.duration" in names
    assert "paceline.slo.verdicts" in names
    assert len(http_collector.metric_requests) == 2
    assert len(http_collector.spans) == 14


def test_configure_sends_no_metrics_by_default(play: Play, http_collector: Any) -> None:
    """Jaeger takes none, so they are sent only when asked for."""
    with paceline.tracing.configure(http_collector.url):
        play(provider=None).run()
    assert http_collector.spans
    assert not http_collector.metric_requests
