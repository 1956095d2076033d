"""What each mode of the embedded engine takes: prefill, decode, batches, cached prefixes, drafts, quality."""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.cli.bench.base import BenchOptions, BenchReport, Goal, memory_speed_gb_per_s, summary
from paceline.cli.bench.trajectories import load_turns, spread
from paceline.cli.progress import progress_bar
from paceline.measured import run_measured
from paceline_engine.backends.embedded import EmbeddedBackend, EmbeddedConfig
from paceline_engine.mode import Drafter, Mode, Variant
from paceline_engine.request import Prompt
from paceline_engine.timeline import Timeline

VARIANTS = (Variant.BF16, Variant.FP8, Variant.INT8, Variant.INT4)
NEW_TOKENS = (32, 256, 1024)
PREFIX_TOKENS = 1500
BATCHES = (1, 4, 8, 16)
BATCH_PROMPT_TOKENS = 16
BATCH_OUTPUT_TOKENS = 16
STREAM_TOKENS = 64
N_STREAMS = 8
KV_TOKENS = 24_576

MIN_SELF_SPEEDUP = 1.5
MIN_BEST_SPEEDUP = 2.0
MIN_PREFIX_SPEEDUP = 8.0
MIN_BATCH_SPEEDUP = 3.0
GOAL_BATCH = 8

Results = dict[str, dict[str, Any]]


def measure(options: BenchOptions) -> BenchReport:
    """Run every mode on one engine. Figures that are compared are taken in turns, pair by pair.

    Raises:
        MissingExtraError: the embedded engine is not installed.
    """
    from paceline.client import require_engine

    require_engine()
    return asyncio.run(_measure(options))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """A started engine and how often to measure."""

    backend: EmbeddedBackend
    vocab_size: int
    variants: tuple[Variant, ...]
    rounds: int
    ids: random.Random

    async def run(self, prompt: Prompt, mode: Mode, max_tokens: int) -> Timeline:
        return (await run_measured(self.backend, prompt, mode, max_tokens=max_tokens)).timeline

    def random_prompt(self, n_tokens: int, *, after: Sequence[int] = ()) -> Prompt:
        """Ids that nothing has cached: what a token is does not change what it costs."""
        token_ids = (*after, *(self.ids.randrange(self.vocab_size) for _ in range(n_tokens)))
        return Prompt(messages=(), token_ids=token_ids, n_tokens=len(token_ids))


async def _measure(options: BenchOptions) -> BenchReport:
    backend = EmbeddedBackend(
        EmbeddedConfig(model=options.model, variants=VARIANTS, kv_tokens=KV_TOKENS, max_sequences=16)
    )
    try:
        with progress_bar() as on_progress:
            info = await backend.start(on_progress)
        bench = _Bench(
            backend=backend,
            vocab_size=info.vocab_size,
            variants=info.variants,
            rounds=2 if options.quick else 5,
            ids=random.Random(0),
        )
        results: Results = {}
        goals: list[Goal] = []
        await _prefill(bench, results)
        await _prefix(bench, results, goals)
        await _decode(bench, results, goals, dict(info.bytes_per_variant))
        await _speculation(bench, results, goals, options)
    finally:
        await backend.aclose()
    return BenchReport(
        name="modes", runs=bench.rounds, results=results, goals=() if options.quick else tuple(goals)
    )


async def _prefill(bench: _Bench, results: Results) -> None:
    """TTFT of prompts of which nothing is cached."""
    for n_tokens in NEW_TOKENS:
        found: dict[Variant, list[float]] = {variant: [] for variant in bench.variants}
        for _ in range(bench.rounds if n_tokens < max(NEW_TOKENS) else 2):
            for variant in bench.variants:
                mode = Mode(variant=variant, prefix_cache=False)
                found[variant].append(_ttft_ms(await bench.run(bench.random_prompt(n_tokens), mode, 1)))
        for variant, values in found.items():
            results[f"{variant}_ttft_{n_tokens}"] = summary(values, "ms")
        _say(f"prefill of {n_tokens} tokens")


async def _prefix(bench: _Bench, results: Results, goals: list[Goal]) -> None:
    """TTFT of a second turn whose first 1,500 tokens are cached, beside the same turn cold."""
    for variant in bench.variants:
        mode = Mode(variant=variant)
        cached: list[float] = []
        cold: list[float] = []
        for _ in range(2):
            prefix = bench.random_prompt(PREFIX_TOKENS)
            cold.append(_ttft_ms(await bench.run(prefix, mode, 1)))
            second = bench.random_prompt(bench.backend.config.block_size, after=prefix.token_ids)
            line = await bench.run(second, mode, 1)
            assert line.cached_tokens >= PREFIX_TOKENS - bench.backend.config.block_size
            cached.append(_ttft_ms(line))
        ratios = [whole / short for whole, short in zip(cold, cached, strict=True)]
        results[f"{variant}_ttft_cached_{PREFIX_TOKENS}"] = summary(cached, "ms")
        results[f"{variant}_prefix_speedup"] = summary(ratios, "times")
        goals.append(
            Goal(
                name=f"{variant}_prefix_speedup",
                value=statistics.median(ratios),
                goal=MIN_PREFIX_SPEEDUP,
                better="higher",
            )
        )
        _say(f"cached prefix, {variant}")


async def _decode(
    bench: _Bench, results: Results, goals: list[Goal], bytes_per_step: dict[Variant, int]
) -> None:
    """TPOT alone and in batches, and the memory traffic that it comes to."""
    memory = memory_speed_gb_per_s()
    found: dict[tuple[Variant, int], list[float]] = {}
    for _ in range(bench.rounds):
        for variant in bench.variants:
            for batch in BATCHES:
                found.setdefault((variant, batch), []).append(await _batch_tpot_ms(bench, variant, batch))
        _say("decode")
    for (variant, batch), values in found.items():
        results[f"{variant}_tpot_batch_{batch}"] = summary(values, "ms")
    for variant in bench.variants:
        speed = bytes_per_step[variant] / statistics.median(found[variant, 1]) / 1e6
        results[f"{variant}_weights_read"] = {
            "unit": "bytes per token",
            "value": bytes_per_step[variant],
            "gb_per_s": round(speed, 2),
            "machine_gb_per_s": round(memory, 2),
        }
    if Variant.INT8 in bench.variants:
        pairs = zip(found[Variant.INT8, 1], found[Variant.INT8, GOAL_BATCH], strict=True)
        ratios = [GOAL_BATCH * alone / together for alone, together in pairs]
        results[f"int8_throughput_batch_{GOAL_BATCH}"] = summary(ratios, "times batch 1")
        goals.append(
            Goal(
                name=f"int8_throughput_batch_{GOAL_BATCH}",
                value=statistics.median(ratios),
                goal=MIN_BATCH_SPEEDUP,
                better="higher",
            )
        )


async def _batch_tpot_ms(bench: _Bench, variant: Variant, batch: int) -> float:
    """Time per token of each of ``batch`` streams, while all of them decode."""
    mode = Mode(variant=variant, prefix_cache=False, batch_cap=batch)
    lines = await asyncio.gather(
        *(
            bench.run(bench.random_prompt(BATCH_PROMPT_TOKENS), mode, BATCH_OUTPUT_TOKENS)
            for _ in range(batch)
        )
    )
    # Streams start and end a step or two apart: only the steps in which all decode count.
    steps = [
        (step.ended_at_s - step.started_at_s) * 1e3
        for step in lines[0].steps
        if step.decode_tokens == batch and not step.prefill_tokens
    ]
    return statistics.median(steps)


async def _speculation(bench: _Bench, results: Results, goals: list[Goal], options: BenchOptions) -> None:
    """Greedy streams of agent turns, plain and with each drafter, stream by stream.

    ``identical_streams`` is the share of streams whose tokens are the same with every drafter.
    """
    info = await bench.backend.start()
    modes = {
        "plain": Mode(variant=Variant.BF16),
        **{
            each.drafter.value: Mode(variant=Variant.BF16, speculation=each)
            for each in info.speculations
            if each.draft_variant is not Variant.BF16
        },
    }
    turns = spread(load_turns(options.data), 2 if options.quick else N_STREAMS)
    tpot: dict[str, list[float]] = {name: [] for name in modes}
    drafted = dict.fromkeys(modes, 0)
    accepted = dict.fromkeys(modes, 0)
    identical: list[bool] = []
    for number, turn in enumerate(turns):
        prompt = await bench.backend.prepare(turn.messages)
        texts: list[tuple[int, ...]] = []
        for name, mode in modes.items():
            run = await run_measured(bench.backend, prompt, mode, max_tokens=STREAM_TOKENS)
            line = run.timeline
            texts.append(run.token_ids)
            drafted[name] += line.drafted_tokens
            accepted[name] += line.accepted_tokens
            tpot[name].append(_required(line.tpot_ms()))
        identical.append(len(set(texts)) == 1)
        _say(f"stream {number + 1} of {len(turns)}")
    for name, values in tpot.items():
        row = summary(values, "ms")
        if drafted[name]:
            row |= {"drafted": drafted[name], "acceptance": accepted[name] / drafted[name]}
        results[f"bf16_tpot_{name}"] = row
    goals.append(Goal(name="identical_streams", value=statistics.mean(identical), goal=1.0, better="higher"))
    drafters = [name for name in modes if name != "plain"]
    _speedup(results, goals, "self_speedup", tpot, [Drafter.SELF.value], MIN_SELF_SPEEDUP)
    _speedup(results, goals, "best_drafter_speedup", tpot, drafters, MIN_BEST_SPEEDUP)


def _speedup(
    results: Results,
    goals: list[Goal],
    name: str,
    tpot: dict[str, list[float]],
    drafters: Sequence[str],
    least: float,
) -> None:
    """Plain TPOT over that of the best of the drafters, stream by stream."""
    if not drafters or any(drafter not in tpot for drafter in drafters):
        return
    ratios = [
        plain / min(tpot[drafter][index] for drafter in drafters) for index, plain in enumerate(tpot["plain"])
    ]
    results[name] = summary(ratios, "times plain")
    goals.append(Goal(name=name, value=statistics.median(ratios), goal=least, better="higher"))


def _ttft_ms(line: Timeline) -> float:
    return _required(line.ttft_ms())


def _required(value: float | None) -> float:
    assert value is not None, "a generation of a benchmark runs to its end"
    return value


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
