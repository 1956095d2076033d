"""What is recorded, and under which names. The settings belong to a tracer provider."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from opentelemetry.trace import TracerProvider

from paceline.tracing.names import Conventions

_ATTRIBUTE = "_paceline_settings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How turns are recorded."""

    record_content: bool = False
    """Record messages, answers, stop strings, tool arguments and the messages of exceptions."""
    conventions: Conventions = Conventions.OPERATION
    content_limit: int = 8192
    """Most characters of one recorded content attribute."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """What OpenTelemetry's own variables ask for."""
        capture = environ.get("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "").strip().lower()
        return cls(
            # `true` is the older spelling; the later ones name where content goes, and we have spans alone.
            record_content=capture in ("true", "span_only", "span_and_event"),
            conventions=Conventions.from_environment(environ),
        )


def bind(provider: TracerProvider, settings: Settings | None) -> None:
    """Give the provider its settings; None takes them away again."""
    setattr(provider, _ATTRIBUTE, settings)


def settings_of(provider: TracerProvider) -> Settings:
    """The provider's settings, else what the environment says."""
    found = getattr(provider, _ATTRIBUTE, None)
    return found if isinstance(found, Settings) else Settings.from_environment()
