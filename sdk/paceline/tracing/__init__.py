"""Tracing through the OpenTelemetry API: names, spans, and a one-call set-up for OTLP."""
