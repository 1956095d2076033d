"""How well the predictions hold on replayed agent turns."""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.cli.bench.base import BenchOptions, BenchReport, Goal, say, summary
from paceline.cli.bench.trajectories import ReplayTurn, load_turns, spread
from paceline.cli.progress import progress_bar

if TYPE_CHECKING:
    from paceline import AsyncClient
    from paceline.report import GenerationRecord
    from paceline_policies.decision import Estimate
    from paceline_policies.slo import SLO

N_TURNS = 60
MAX_TOKENS = 48
MAX_P50_ERROR = 0.25
MIN_P90_COVERAGE = 0.80
MAX_P90_COVERAGE = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One prediction and what came."""

    mode: str
    estimate: Estimate
    measured_ms: float

    @property
    def relative_error(self) -> float:
        return abs(self.estimate.p50_ms - self.measured_ms) / self.measured_ms

    @property
    def covered(self) -> bool:
        return self.measured_ms <= self.estimate.p90_ms


def measure(options: BenchOptions) -> BenchReport:
    """Replay turns in order, alternating a loose SLO (best quality) with a tight one (fastest)."""
    turns = spread(load_turns(options.data), 8 if options.quick else N_TURNS)
    records = asyncio.run(_replay(options.model, turns))
    ttft = [
        _sample(record, record.decision.prediction.ttft, record.timeline.ttft_ms(delivered=True))
        for record in records
        if record.decision.prediction is not None
    ]
    tpot = [
        _sample(record, record.decision.prediction.tpot, record.timeline.tpot_ms(delivered=True))
        for record in records
        if record.decision.prediction is not None
    ]
    by_budget = {
        "ttft": [sample for sample in ttft if sample is not None],
        "tpot": [sample for sample in tpot if sample is not None],
    }
    results: dict[str, dict[str, Any]] = {}
    goals: list[Goal] = []
    for budget, samples in by_budget.items():
        coverage = statistics.mean(sample.covered for sample in samples)
        error = summary([sample.relative_error for sample in samples], "share of measured")
        results[f"{budget}_p50_error"] = error
        results[f"{budget}_measured"] = summary([sample.measured_ms for sample in samples], "ms")
        results[f"{budget}_p90_coverage"] = {"unit": "share of turns", "value": coverage, "n": len(samples)}
        goals += [
            Goal(name=f"{budget}_p50_error", value=error["median"], goal=MAX_P50_ERROR, better="lower"),
            Goal(name=f"{budget}_p90_coverage_low", value=coverage, goal=MIN_P90_COVERAGE, better="higher"),
            Goal(name=f"{budget}_p90_coverage_high", value=coverage, goal=MAX_P90_COVERAGE, better="lower"),
        ]
    modes = sorted({sample.mode for sample in by_budget["ttft"]})
    return BenchReport(
        name="predict",
        runs=len(records),
        results=results,
        goals=() if options.quick else tuple(goals),
        details={
            "modes": {mode: _by_mode(by_budget, mode) for mode in modes},
            "turns": len(turns),
            "max_tokens": MAX_TOKENS,
        },
    )


async def _replay(model: str, turns: list[ReplayTurn]) -> list[GenerationRecord]:
    import paceline

    loose = paceline.SLO(ttft_ms=None, tpot_ms=None, e2e_ms=600_000, adapt=False)
    tight = paceline.SLO(ttft_ms=1, tpot_ms=1, e2e_ms=1, adapt=False)
    records: list[GenerationRecord] = []
    with progress_bar() as on_progress:
        client = await paceline.AsyncClient(model, on_progress=on_progress).__aenter__()
    try:
        for number, turn in enumerate(turns):
            records.append(await _one(client, turn, loose if number % 2 == 0 else tight))
            say(f"turn {number + 1} of {len(turns)}")
    finally:
        await client.aclose()
    return records


async def _one(client: AsyncClient, replayed: ReplayTurn, slo: SLO) -> GenerationRecord:
    async with client.turn(slo=slo) as turn:
        async for _ in turn.stream(replayed.messages, max_tokens=MAX_TOKENS):
            pass
    return turn.report.generations[0]


def _sample(record: GenerationRecord, estimate: Estimate | None, measured_ms: float | None) -> Sample | None:
    if estimate is None or measured_ms is None:
        return None
    plan = record.decision.plan
    return Sample(
        mode=plan.mode.label if plan is not None else "", estimate=estimate, measured_ms=measured_ms
    )


def _by_mode(by_budget: dict[str, list[Sample]], mode: str) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for budget, samples in by_budget.items():
        mine = [sample for sample in samples if sample.mode == mode]
        if mine:
            row[budget] = {
                "p50_error": statistics.median(sample.relative_error for sample in mine),
                "p90_coverage": statistics.mean(sample.covered for sample in mine),
                "measured_ms": statistics.median(sample.measured_ms for sample in mine),
                "n": len(mine),
            }
    return row
