"""Tracing through the OpenTelemetry API: names, spans, and a one-call set-up for OTLP."""

from paceline.tracing.context import Activation, activate

__all__ = ["Activation", "activate"]
