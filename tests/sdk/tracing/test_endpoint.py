"""Where spans go, from arguments and environment variables."""

from __future__ import annotations

import pytest

from paceline.tracing.endpoint import resolve
from paceline_engine.errors import InvalidValueError

TRACES = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
GENERAL = "OTEL_EXPORTER_OTLP_ENDPOINT"
PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"


@pytest.mark.parametrize(
    ("endpoint", "protocol", "environ", "expected"),
    [
        (None, None, {}, ("grpc", "http://localhost:4317")),
        (None, "http/protobuf", {}, ("http/protobuf", "http://localhost:4318/v1/traces")),
        (None, None, {PROTOCOL: "http/protobuf"}, ("http/protobuf", "http://localhost:4318/v1/traces")),
        ("http://h:4317", None, {}, ("grpc", "http://h:4317")),
        ("http://h:4318", None, {PROTOCOL: "grpc"}, ("http/protobuf", "http://h:4318/v1/traces")),
        ("http://h:4318/v1/traces", None, {}, ("http/protobuf", "http://h:4318/v1/traces")),
        ("https://h/otlp/", None, {}, ("http/protobuf", "https://h/otlp/v1/traces")),
        ("https://h:9999", None, {PROTOCOL: "grpc"}, ("grpc", "https://h:9999")),
        ("https://h:9999", None, {}, ("http/protobuf", "https://h:9999/v1/traces")),
        ("h:9999", None, {}, ("grpc", "http://h:9999")),
        ("localhost:4318", None, {}, ("http/protobuf", "http://localhost:4318/v1/traces")),
        ("grpc://h:5000", None, {}, ("grpc", "http://h:5000")),
        ("grpcs://h:5000", None, {}, ("grpc", "https://h:5000")),
        ("http://[::1]:4317", None, {}, ("grpc", "http://[::1]:4317")),
        ("http://h:4317", "http/protobuf", {}, ("http/protobuf", "http://h:4317/v1/traces")),
        (None, None, {GENERAL: "http://g:4318", TRACES: "http://t:4317"}, ("grpc", "http://t:4317")),
    ],
)
def test_endpoint_and_protocol(
    endpoint: str | None, protocol: str | None, environ: dict[str, str], expected: tuple[str, str]
) -> None:
    """Arguments come before what the endpoint tells, that before the environment, that before defaults."""
    target = resolve(endpoint, protocol, environ=environ)
    assert (target.protocol, target.traces_url) == expected
    assert target.insecure is expected[1].startswith("http://")


def test_metrics_go_to_their_own_path() -> None:
    """Over HTTP the two signals have a path each, over gRPC they share the address."""
    assert resolve("http://h:4318/v1/traces", None, environ={}).metrics_url == "http://h:4318/v1/metrics"
    assert resolve("http://h:4317", None, environ={}).metrics_url == "http://h:4317"


@pytest.mark.parametrize("endpoint", ["", "http://", "ftp://h:1", "http://h:port", "http://h:99999", "://"])
def test_what_is_no_address_is_refused(endpoint: str) -> None:
    """An endpoint without a host, with another scheme or a port that is none is refused by name."""
    if not endpoint:
        assert resolve(endpoint, None, environ={}).traces_url == "http://localhost:4317"
        return
    with pytest.raises(InvalidValueError, match="endpoint must be an address"):
        resolve(endpoint, None, environ={})
