"""Tracing through the OpenTelemetry API: names, spans, and a one-call set-up for OTLP."""

from paceline.tracing.context import Activation, activate
from paceline.tracing.names import Conventions
from paceline.tracing.setup import TracingHandle, configure

__all__ = ["Activation", "Conventions", "TracingHandle", "activate", "configure"]
