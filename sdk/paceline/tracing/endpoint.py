"""Where spans are sent, and how: worked out from arguments and OpenTelemetry's environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import SplitResult, urlsplit

from paceline_engine.errors import InvalidValueError, UnknownOptionError

Protocol = Literal["grpc", "http/protobuf"]

_GRPC_PORT = 4317
_HTTP_PORT = 4318
_TRACES_PATH = "/v1/traces"
_METRICS_PATH = "/v1/metrics"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A collector."""

    protocol: Protocol
    traces_url: str
    metrics_url: str
    insecure: bool
    """Without TLS."""


def resolve(endpoint: str | None, protocol: str | None, *, environ: Mapping[str, str] = os.environ) -> Target:
    """The collector to send to.

    ``endpoint`` is ``http://host:port``, ``host:port`` (gRPC), ``grpc://host:port`` or a full URL; without
    it OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, OTEL_EXPORTER_OTLP_ENDPOINT and the protocol's port on localhost
    count, in this order. The protocol is the argument, else what the port (4317 gRPC, 4318 HTTP), scheme or
    path says, else OTEL_EXPORTER_OTLP_TRACES_PROTOCOL or OTEL_EXPORTER_OTLP_PROTOCOL, else HTTP where an
    endpoint is given and gRPC where none is.

    Raises:
        InvalidValueError: the endpoint is no address.
        UnknownOptionError: the protocol does not exist.
    """
    asked = protocol or environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or None
    asked = asked or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or None
    address = endpoint or environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or None
    address = address or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or None
    if address is None:
        chosen = _known(asked or "grpc")
        address = f"http://localhost:{_GRPC_PORT if chosen == 'grpc' else _HTTP_PORT}"
    url = _parse(address)
    chosen = _known(protocol or _told_by(url, address) or asked or "http/protobuf")
    return _target(url, chosen)


def _parse(address: str) -> SplitResult:
    try:
        url = urlsplit(address if "://" in address else f"grpc://{address}")
        valid = bool(url.hostname) and (url.port is None or url.port > 0)
    except ValueError:
        valid = False
    else:
        if valid and url.scheme in ("http", "https", "grpc", "grpcs"):
            return url
    raise InvalidValueError(
        "endpoint",
        observed=address,
        limit="an address such as http://localhost:4317",
        remedy="give scheme, host and port of the collector",
    )


def _told_by(url: SplitResult, address: str) -> Protocol | None:
    if url.port == _GRPC_PORT or url.scheme in ("grpc", "grpcs"):
        return "http/protobuf" if url.port == _HTTP_PORT else "grpc"
    if url.port == _HTTP_PORT or url.path not in ("", "/"):
        return "http/protobuf"
    return None


def _known(protocol: str) -> Protocol:
    match protocol.strip().lower():
        case "grpc":
            return "grpc"
        case "http/protobuf" | "http":
            return "http/protobuf"
        case _:
            raise UnknownOptionError(
                "protocol",
                observed=protocol,
                limit="'grpc' or 'http/protobuf'",
                remedy="Jaeger and the OpenTelemetry collector take gRPC at 4317 and HTTP at 4318",
            )


def _target(url: SplitResult, protocol: Protocol) -> Target:
    insecure = url.scheme in ("http", "grpc")
    root = f"{'http' if insecure else 'https'}://{url.netloc}"
    if protocol == "grpc":
        return Target(protocol=protocol, traces_url=root, metrics_url=root, insecure=insecure)
    path = url.path.rstrip("/")
    base = path.removesuffix(_TRACES_PATH)
    return Target(
        protocol=protocol,
        traces_url=f"{root}{base}{_TRACES_PATH}",
        metrics_url=f"{root}{base}{_METRICS_PATH}",
        insecure=insecure,
    )
