"""What Paceline itself takes: a turn's overhead, a busy agent beside a stream, and the start."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from paceline.cli.bench.base import BenchOptions, BenchReport, Goal, say, summary
from paceline.cli.bench.busy import busy_process, busy_thread
from paceline.cli.bench.trajectories import ReplayTurn, load_turns, spread
from paceline.cli.progress import progress_bar
from paceline_engine.errors import MissingExtraError

if TYPE_CHECKING:
    from paceline import AsyncClient
    from paceline.testing import ScriptedBackend

MAX_TURN_OVERHEAD_MS = 3.0
MAX_SHARE_OF_TPOT = 0.02
MAX_BUSY_RATIO = 1.15
MAX_START_S = 4.0
MAX_HELP_S = 0.3

REPLY_TOKENS = 48
WARM_TURNS = 10
QUESTION = "My flight was cancelled. What are my options?"
LOOPS: Mapping[str, Callable[[], AbstractContextManager[object]]] = MappingProxyType(
    {"tpot_busy_thread": busy_thread, "tpot_busy_process": busy_process}
)
HELP = "from paceline.cli.main import main; main()"
FIRST_DECISION = """
import asyncio, sys
import paceline

async def main():
    async with paceline.AsyncClient(sys.argv[1]) as client, client.turn() as turn:
        decision = await turn.plan("Where is my bag?", max_tokens=16)
        print(decision.action, flush=True)

asyncio.run(main())
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """How often each thing is measured."""

    turns: int
    pairs: int
    pair_tokens: int
    starts: int
    helps: int


FULL = Runs(turns=300, pairs=5, pair_tokens=16, starts=3, helps=9)
QUICK = Runs(turns=20, pairs=1, pair_tokens=8, starts=1, helps=2)


def measure(options: BenchOptions) -> BenchReport:
    """Measure a scripted turn first, then the real engine, then processes from their start.

    Raises:
        MissingExtraError: tracing can only be measured with the OpenTelemetry SDK.
        PacelineError: the model cannot be had, or the data not be read.
    """
    from paceline.client import require_engine

    require_engine()
    runs = QUICK if options.quick else FULL
    turns = spread(load_turns(options.data), 8)
    scripted = asyncio.run(_scripted(runs))
    real = asyncio.run(_real(options.model, turns, runs))
    # The engine has ended here, so that what starts has the machine for itself.
    say("starting Python to the first decision")
    _first_decision_s(options.model)
    starts, imports = [], []
    for _ in range(runs.starts):
        starts.append(_first_decision_s(options.model))
        imports.append(_run_s("import torch"))
    say("paceline --help")
    helps = [_run_s(HELP, "--help") for _ in range(runs.helps)]

    tpot_ms = statistics.median(real["tpot_quiet"])
    per_token_ms = statistics.median(scripted["traced"]) / REPLY_TOKENS
    ratios = [
        ours / beside
        for ours, beside in zip(real["tpot_busy_thread"], real["tpot_busy_process"], strict=True)
    ]
    results = {
        "turn_overhead": summary(scripted["traced"], "ms a turn"),
        "turn_overhead_with_metrics": summary(scripted["metered"], "ms a turn"),
        "turn_overhead_untraced": summary(scripted["untraced"], "ms a turn"),
        "overhead_per_token": summary([each / REPLY_TOKENS for each in scripted["traced"]], "ms a token"),
        "overhead_share_of_tpot": {"unit": "share of the measured TPOT", "value": per_token_ms / tpot_ms},
        "template_and_tokens": summary(real["prepare"], "ms a prompt"),
        "tpot_quiet": summary(real["tpot_quiet"], "ms"),
        "tpot_busy_thread": summary(real["tpot_busy_thread"], "ms"),
        "tpot_busy_process": summary(real["tpot_busy_process"], "ms"),
        "busy_ratio": summary(ratios, "TPOT beside a busy thread / beside a busy process"),
        "first_decision": summary(starts, "s"),
        "torch_import": summary(imports, "s, a process that imports torch and ends"),
        "help": summary(helps, "s"),
    }
    goals = (
        _below("turn_overhead_ms", statistics.median(scripted["traced"]), MAX_TURN_OVERHEAD_MS),
        _below("overhead_share_of_tpot", per_token_ms / tpot_ms, MAX_SHARE_OF_TPOT),
        _below("busy_ratio", statistics.median(ratios), MAX_BUSY_RATIO),
        _below("first_decision_s", statistics.median(starts), MAX_START_S),
        _below("help_s", statistics.median(helps), MAX_HELP_S),
    )
    return BenchReport(
        name="overhead",
        runs=runs.turns,
        results=results,
        goals=() if options.quick else goals,
        details={"reply_tokens": REPLY_TOKENS, "pairs": runs.pairs, "pair_tokens": runs.pair_tokens},
    )


def _below(name: str, value: float, goal: float) -> Goal:
    return Goal(name=name, value=value, goal=goal, better="lower")


async def _scripted(runs: Runs) -> dict[str, list[float]]:
    """Milliseconds that a whole turn takes beyond reading the same stream from its backend."""
    import paceline
    from paceline_engine.mode import Variant

    backend = paceline.testing.ScriptedBackend(
        " ".join(["word"] * REPLY_TOKENS),
        prefill_ms=0.0,
        tpot_ms=0.0,
        speeds={Variant.BF16: 1.0, Variant.INT8: 1.0, Variant.INT4: 1.0},
    )
    say(f"{runs.turns} turns over a backend that takes no time")
    with _recorded_spans():
        traced = await paceline.AsyncClient(backend=backend).__aenter__()
        untraced = await paceline.AsyncClient(backend=backend, tracing=False).__aenter__()
        await _overheads(backend, {"": traced}, WARM_TURNS)
        found = await _overheads(backend, {"traced": traced, "untraced": untraced}, runs.turns)
        with _recorded_metrics():
            await _overheads(backend, {"": traced}, WARM_TURNS)
            found |= await _overheads(backend, {"metered": traced}, runs.turns)
        await traced.aclose()
    return found


async def _overheads(
    backend: ScriptedBackend, clients: Mapping[str, AsyncClient], n_turns: int
) -> dict[str, list[float]]:
    """Turn about, each beside the stream alone, so that a change of the machine's speed meets all alike."""
    found: dict[str, list[float]] = {name: [] for name in clients}
    for _ in range(n_turns):
        direct_ms = await _direct_ms(backend)
        for name, client in clients.items():
            found[name].append(await _turn_ms(client) - direct_ms)
    return found


async def _turn_ms(client: AsyncClient) -> float:
    started = time.perf_counter()
    async with client.turn() as turn:
        async for _ in turn.stream(QUESTION, max_tokens=REPLY_TOKENS):
            pass
    return (time.perf_counter() - started) * 1e3


async def _direct_ms(backend: ScriptedBackend) -> float:
    from paceline_engine.mode import Mode, Variant
    from paceline_engine.plan import Plan
    from paceline_engine.request import GenerationRequest

    prompt = await backend.prepare([{"role": "user", "content": QUESTION}])
    request = GenerationRequest(id="direct", prompt=prompt)
    plan = Plan(mode=Mode(variant=Variant.BF16), max_tokens=REPLY_TOKENS)
    started = time.perf_counter()
    async for _ in backend.submit(request, plan):
        pass
    return (time.perf_counter() - started) * 1e3


@contextmanager
def _recorded_spans() -> Generator[None]:
    """Record every span with the OpenTelemetry SDK, and export them in batches to memory."""
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    except ImportError as error:
        raise MissingExtraError("otlp", needed_for="measuring what tracing takes") from error
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(InMemorySpanExporter()))
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        provider.shutdown()


@contextmanager
def _recorded_metrics() -> Generator[None]:
    """Record every metric too; one point goes into a histogram for each chunk of a stream."""
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    provider = MeterProvider(metric_readers=[InMemoryMetricReader()], shutdown_on_exit=False)
    metrics.set_meter_provider(provider)
    try:
        yield
    finally:
        provider.shutdown()


async def _real(model: str, turns: Sequence[ReplayTurn], runs: Runs) -> dict[str, list[float]]:
    """Template and tokens of agent prompts, and TPOT alone, beside a busy thread and a busy process."""
    import paceline
    from paceline_engine.backends.embedded import EmbeddedBackend, EmbeddedConfig
    from paceline_engine.mode import Variant

    found: dict[str, list[float]] = {
        name: [] for name in ("prepare", "tpot_quiet", "tpot_busy_thread", "tpot_busy_process")
    }
    # One variant, so that every run uses the same mode; nothing is predicted, so no calibration is needed.
    backend = EmbeddedBackend(EmbeddedConfig(model=model, variants=(Variant.BF16,)))
    with progress_bar() as on_progress:
        client = await paceline.AsyncClient(
            backend=backend, profile="assume", on_progress=on_progress, tracing=False
        ).__aenter__()
    try:
        for replayed in turns:
            await backend.prepare(replayed.messages)
            started = time.perf_counter()
            await backend.prepare(replayed.messages)
            found["prepare"].append((time.perf_counter() - started) * 1e3)
        await _tpot_ms(client, runs.pair_tokens)
        for number in range(runs.pairs):
            say(f"busy agent, pair {number + 1} of {runs.pairs}")
            found["tpot_quiet"].append(await _tpot_ms(client, runs.pair_tokens))
            for name in sorted(LOOPS, reverse=bool(number % 2)):
                with LOOPS[name]():
                    found[name].append(await _tpot_ms(client, runs.pair_tokens))
    finally:
        await client.aclose()
    return found


async def _tpot_ms(client: AsyncClient, n_tokens: int) -> float:
    """TPOT as it reaches the agent, of one generation."""
    async with client.turn() as turn:
        await turn.generate(QUESTION, max_tokens=n_tokens, ignore_eos=True)
    tpot_ms = turn.report.generations[0].timeline.tpot_ms(delivered=True)
    assert tpot_ms is not None, "several tokens, each in a step of its own"
    return tpot_ms


def _first_decision_s(model: str) -> float:
    started = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", FIRST_DECISION, model], stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        ended = time.monotonic()
    if process.returncode or not line:
        raise RuntimeError(f"the process that plans ended with exit status {process.returncode}")
    return ended - started


def _run_s(program: str, *arguments: str) -> float:
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - started
