"""Metrics of model calls and verdicts, through the OpenTelemetry API. No-op until a meter provider is set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

from opentelemetry.metrics import Histogram, Meter, MeterProvider
from opentelemetry.util.types import AttributeValue

from paceline.report import Verdict
from paceline.tracing import names
from paceline.tracing.names import Conventions
from paceline_engine.chunk import Usage
from paceline_engine.timeline import TokenTime

Labels = Mapping[str, AttributeValue]


class Instruments:
    """The instruments of one meter provider, named by one state of the conventions."""

    def __init__(self, provider: MeterProvider, conventions: Conventions) -> None:
        meter = provider.get_meter(names.INSTRUMENTATION)
        self._duration = _seconds(meter, conventions.duration, "Duration of a model call.")
        self._first_chunk = _seconds(
            meter, conventions.time_to_first_chunk, "Time from the start of a model call to its first chunk."
        )
        self._chunk_gap = _seconds(
            meter, conventions.time_per_output_chunk, "Time between a chunk and the chunk before it."
        )
        self._usage = (
            _UsageHistogram(meter) if conventions is Conventions.OPERATION else _UsageCounters(meter)
        )
        self._verdicts = meter.create_counter(
            names.SLO_VERDICTS, unit="{verdict}", description="Budgets of turns, met and missed."
        )

    def record_call(
        self, labels: Labels, *, duration_s: float, first_chunk_s: float | None, error_type: str | None
    ) -> None:
        """One model call that ended; the time to its first chunk where one came."""
        ended = labels if error_type is None else {**labels, names.ERROR_TYPE: error_type}
        self._duration.record(duration_s, ended)
        if first_chunk_s is not None:
            self._first_chunk.record(first_chunk_s, labels)

    def record_chunks(self, labels: Labels, tokens: Sequence[TokenTime]) -> None:
        """The gaps between the chunks, as the caller took them where that is known."""
        times = [
            token.made_at_s if token.delivered_at_s is None else token.delivered_at_s for token in tokens
        ]
        for before, after in pairwise(times):
            self._chunk_gap.record(max(0.0, after - before), labels)

    def record_usage(self, labels: Labels, usage: Usage) -> None:
        self._usage.record(labels, usage)

    def record_verdict(self, verdict: Verdict) -> None:
        labels: dict[str, AttributeValue] = {names.BUDGET: verdict.budget, names.SLO_MET: verdict.met}
        if verdict.blame is not None:
            labels[names.SLO_BLAME] = verdict.blame
        self._verdicts.add(1, labels)


class _UsageHistogram:
    """Tokens per call, told apart by ``gen_ai.token.type``."""

    def __init__(self, meter: Meter) -> None:
        self._tokens = meter.create_histogram(
            names.TOKEN_USAGE,
            unit="{token}",
            description="Tokens of a model call.",
            explicit_bucket_boundaries_advisory=names.TOKEN_BUCKETS,
        )

    def record(self, labels: Labels, usage: Usage) -> None:
        self._tokens.record(usage.prompt_tokens, {**labels, names.TOKEN_TYPE: "input"})
        self._tokens.record(usage.completion_tokens, {**labels, names.TOKEN_TYPE: "output"})


class _UsageCounters:
    """One counter for each kind of token, told apart by ``gen_ai.token.modality``."""

    def __init__(self, meter: Meter) -> None:
        self._input = meter.create_counter(names.INFERENCE_INPUT_TOKENS, unit="{token}")
        self._output = meter.create_counter(names.INFERENCE_OUTPUT_TOKENS, unit="{token}")
        self._cache_read = meter.create_counter(names.INFERENCE_CACHE_READ_TOKENS, unit="{token}")

    def record(self, labels: Labels, usage: Usage) -> None:
        text = {**labels, names.TOKEN_MODALITY: "text"}
        self._input.add(usage.prompt_tokens, text)
        self._output.add(usage.completion_tokens, text)
        self._cache_read.add(usage.cached_tokens, text)


def taken_at(token: TokenTime) -> float:
    """When the caller took the chunk, or when it was made where nobody took it."""
    return token.made_at_s if token.delivered_at_s is None else token.delivered_at_s


@lru_cache(maxsize=8)
def instruments(provider: MeterProvider, conventions: Conventions) -> Instruments:
    """The provider's instruments, made once: creating them takes far longer than recording."""
    return Instruments(provider, conventions)


def _seconds(meter: Meter, name: str, description: str) -> Histogram:
    return meter.create_histogram(
        name, unit="s", description=description, explicit_bucket_boundaries_advisory=names.SECONDS_BUCKETS
    )
