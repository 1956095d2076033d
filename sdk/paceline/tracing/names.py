"""Every name that Paceline writes into spans and metrics.

``gen_ai.*`` and ``error.type`` follow the OpenTelemetry semantic conventions for generative AI, which are
still in development; ``paceline.*`` stands where they have no name. The names are spelled out here, since
the constants of the ``opentelemetry-semantic-conventions`` package live in a private module that changes
from release to release.

The conventions rename the metrics of a model call from ``gen_ai.client.operation.*`` to
``gen_ai.client.inference.*`` and split the token histogram into counters. `Conventions` is the one switch.

Source: https://github.com/open-telemetry/semantic-conventions-genai
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

INSTRUMENTATION: Final = "paceline"
PROVIDER: Final = "paceline"

# Conventions: attributes
OPERATION_NAME: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
AGENT_NAME: Final = "gen_ai.agent.name"
TOOL_NAME: Final = "gen_ai.tool.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
REQUEST_TOP_P: Final = "gen_ai.request.top_p"
REQUEST_TOP_K: Final = "gen_ai.request.top_k"
REQUEST_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
REQUEST_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
REQUEST_SEED: Final = "gen_ai.request.seed"
REQUEST_CHOICE_COUNT: Final = "gen_ai.request.choice.count"
REQUEST_STOP_SEQUENCES: Final = "gen_ai.request.stop_sequences"
RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
RESPONSE_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
"""Seconds."""
USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
USAGE_CACHE_READ_INPUT_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
TOKEN_TYPE: Final = "gen_ai.token.type"
TOKEN_MODALITY: Final = "gen_ai.token.modality"
ERROR_TYPE: Final = "error.type"
EXCEPTION_EVENT: Final = "exception"
EXCEPTION_TYPE: Final = "exception.type"
EXCEPTION_STACKTRACE: Final = "exception.stacktrace"

# Conventions: operations
INVOKE_AGENT: Final = "invoke_agent"
CHAT: Final = "chat"
EXECUTE_TOOL: Final = "execute_tool"

# Paceline: spans and events
DECIDE_SPAN: Final = "paceline.decide"
DEADLINE_EVENT: Final = "paceline.slo.deadline"

# Paceline: attributes of the turn
SLO_MET: Final = "paceline.slo.met"
SLO_MISSED: Final = "paceline.slo.missed"
SLO_BLAME: Final = "paceline.slo.blame"
SLO_CONFIDENCE: Final = "paceline.slo.confidence"
SLO_ON_INFEASIBLE: Final = "paceline.slo.on_infeasible"
SLO_HARD: Final = "paceline.slo.hard"
SLO_MIN_QUALITY: Final = "paceline.slo.min_quality"
SLO_ADAPT: Final = "paceline.slo.adapt"
GENERATIONS: Final = "paceline.generations"
CANCELLED: Final = "paceline.cancelled"

# Paceline: attributes of a model call
KIND: Final = "paceline.kind"
BACKEND: Final = "paceline.backend"
REQUEST_ID: Final = "paceline.request.id"
OPTIONS: Final = "paceline.options"
"""How many options a ``choose`` call scores."""
GRAMMAR: Final = "paceline.grammar"
"""What the output keeps to: ``json_schema``, ``regex`` or ``one_of``."""
DECISION: Final = "paceline.decision"
VARIANT_CHANGES: Final = "paceline.variant_changes"
"""How often the stream was moved to another variant; each move is an event of its decode span."""
DRAFTED_TOKENS: Final = "paceline.drafted_tokens"
ACCEPTED_TOKENS: Final = "paceline.accepted_tokens"

# Paceline: attributes of a tool
CACHE_PINNED_TOKENS: Final = "paceline.cache.pinned_prompt_tokens"
"""Tokens of the prompt that was to stay cached while the tool ran."""

# Paceline: attributes of a deadline event and of verdicts
BUDGET: Final = "paceline.slo.budget"
LIMIT_MS: Final = "paceline.slo.limit_ms"

# Metrics
SLO_VERDICTS: Final = "paceline.slo.verdicts"
SECONDS_BUCKETS: Final = tuple(0.01 * 2**power for power in range(14))
"""0.01, 0.02, ... 81.92."""
TOKEN_BUCKETS: Final = tuple(float(4**power) for power in range(14))
"""1, 4, ... 67108864."""


def slo_budget(budget: str) -> str:
    """The attribute with a budget in milliseconds, such as ``paceline.slo.ttft_ms``."""
    return f"paceline.slo.{budget}_ms"


def slo_verdict(budget: str, what: str) -> str:
    """An attribute of one budget's verdict, such as ``paceline.slo.ttft.measured_ms``."""
    return f"paceline.slo.{budget}.{what}"


def phase_span(phase: str) -> str:
    """The span of one phase, such as ``paceline.prefill``."""
    return f"paceline.{phase}"


def phase_total(phase: str) -> str:
    """The turn's attribute with the time that a phase took in all, such as ``paceline.phase.queue_ms``."""
    return f"paceline.phase.{phase}_ms"


class Conventions(StrEnum):
    """Which state of the conventions names the metrics of a model call."""

    OPERATION = "operation"
    """``gen_ai.client.operation.*`` and ``gen_ai.client.token.usage``: what most dashboards know today."""
    INFERENCE = "inference"
    """``gen_ai.client.inference.*``: where the conventions are going."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Conventions:
        """``inference`` where OTEL_SEMCONV_STABILITY_OPT_IN lists ``gen_ai_latest_experimental``."""
        opted = environ.get("OTEL_SEMCONV_STABILITY_OPT_IN", "").split(",")
        return cls.INFERENCE if "gen_ai_latest_experimental" in (o.strip() for o in opted) else cls.OPERATION

    @property
    def duration(self) -> str:
        return f"{self._root}.duration"

    @property
    def time_to_first_chunk(self) -> str:
        return f"{self._root}.time_to_first_chunk"

    @property
    def time_per_output_chunk(self) -> str:
        return f"{self._root}.time_per_output_chunk"

    @property
    def _root(self) -> str:
        return f"gen_ai.client.{self.value}"


TOKEN_USAGE: Final = "gen_ai.client.token.usage"
"""Histogram of the ``operation`` conventions, told apart by ``gen_ai.token.type``."""
INFERENCE_INPUT_TOKENS: Final = "gen_ai.client.inference.usage.input_tokens"
INFERENCE_OUTPUT_TOKENS: Final = "gen_ai.client.inference.usage.output_tokens"
INFERENCE_CACHE_READ_TOKENS: Final = "gen_ai.client.inference.usage.cache_read.input_tokens"
