"""What each mode of the embedded engine takes: prefill, decode, batches, cached prefixes, drafts, quality."""

from __future__ import annotations

import asyncio
import statistics

from paceline.cli.bench.base import BenchOptions, BenchReport, memory_speed_gb_per_s, say, summary
from paceline.cli.bench.modes_base import ModesBench
from paceline.cli.bench.modes_drafts import measure_drafts
from paceline.cli.bench.modes_quality import measure_fidelity
from paceline.cli.bench.trajectories import load_turns
from paceline.cli.progress import progress_bar
from paceline_engine.backends.embedded import EmbeddedBackend, EmbeddedConfig
from paceline_engine.mode import Mode, Variant
from paceline_engine.timeline import Timeline

VARIANTS = (Variant.BF16, Variant.FP8, Variant.INT8, Variant.INT4)
NEW_TOKENS = (32, 256, 1024)
PREFIX_TOKENS = 1500
BATCHES = (1, 4, 8, 16)
BATCH_PROMPT_TOKENS = 16
BATCH_OUTPUT_TOKENS = 16
KV_TOKENS = 24_576

MIN_PREFIX_SPEEDUP = 8.0
MIN_BATCH_SPEEDUP = 3.0
GOAL_BATCH = 8


def measure(options: BenchOptions) -> BenchReport:
    """Run every mode on one engine. Figures that are compared are taken in turns, pair by pair.

    Raises:
        MissingExtraError: the embedded engine is not installed.
        InvalidValueError: ``options.data`` cannot be read.
    """
    from paceline.client import require_engine

    require_engine()
    load_turns(options.data)  # what cannot be read is told now, and not after minutes
    return asyncio.run(_measure(options))


async def _measure(options: BenchOptions) -> BenchReport:
    backend = EmbeddedBackend(
        EmbeddedConfig(model=options.model, variants=VARIANTS, kv_tokens=KV_TOKENS, max_sequences=16)
    )
    try:
        with progress_bar() as on_progress:
            info = await backend.start(on_progress)
        bench = ModesBench(backend=backend, info=info, quick=options.quick)
        await measure_all(bench, options)
    finally:
        await backend.aclose()
    return BenchReport(
        name="modes",
        runs=bench.rounds,
        results=bench.results,
        goals=() if options.quick else tuple(bench.goals),
        details=bench.details,
    )


async def measure_all(bench: ModesBench, options: BenchOptions) -> None:
    """Every part of the benchmark, in order."""
    await measure_prefill(bench)
    await measure_prefix(bench)
    await measure_decode(bench)
    await measure_drafts(bench, options.data)
    await measure_fidelity(bench, options.data)


async def measure_prefill(bench: ModesBench) -> None:
    """TTFT of prompts of which nothing is cached."""
    for n_tokens in NEW_TOKENS:
        found: dict[Variant, list[float]] = {variant: [] for variant in bench.info.variants}
        for _ in range(bench.rounds):
            for variant in bench.info.variants:
                mode = Mode(variant=variant, prefix_cache=False)
                found[variant].append(ttft_ms(await bench.run(bench.random_prompt(n_tokens), mode, 1)))
        for variant, values in found.items():
            bench.results[f"{variant}_ttft_{n_tokens}"] = summary(values, "ms")
        say(f"prefill of {n_tokens} tokens")


async def measure_prefix(bench: ModesBench) -> None:
    """TTFT of a second turn whose first 1,500 tokens are cached, beside the same turn cold."""
    for variant in bench.info.variants:
        mode = Mode(variant=variant)
        cached: list[float] = []
        cold: list[float] = []
        for _ in range(bench.rounds):
            prefix = bench.random_prompt(PREFIX_TOKENS)
            cold.append(ttft_ms(await bench.run(prefix, mode, 1)))
            second = bench.random_prompt(bench.backend.config.block_size, after=prefix.token_ids)
            line = await bench.run(second, mode, 1)
            assert line.cached_tokens >= PREFIX_TOKENS - bench.backend.config.block_size
            cached.append(ttft_ms(line))
        bench.results[f"{variant}_ttft_cached_{PREFIX_TOKENS}"] = summary(cached, "ms")
        ratios = [whole / short for whole, short in zip(cold, cached, strict=True)]
        bench.ratio_goal(f"{variant}_prefix_speedup", ratios, "times", least=MIN_PREFIX_SPEEDUP)
        say(f"cached prefix, {variant}")


async def measure_decode(bench: ModesBench) -> None:
    """TPOT alone and in batches, and the memory traffic that it comes to."""
    found: dict[tuple[Variant, int], list[float]] = {}
    memory: list[float] = []
    for number in range(bench.rounds):
        memory.append(memory_speed_gb_per_s())
        for variant in bench.info.variants:
            for batch in BATCHES:
                found.setdefault((variant, batch), []).append(await _batch_tpot_ms(bench, variant, batch))
        say(f"decode, round {number + 1} of {bench.rounds}")
    for (variant, batch), values in found.items():
        bench.results[f"{variant}_tpot_batch_{batch}"] = summary(values, "ms")
    for variant, n_bytes in bench.info.bytes_per_variant.items():
        bench.results[f"{variant}_weights_read"] = {
            "unit": "bytes per token",
            "value": n_bytes,
            "gb_per_s": round(n_bytes / statistics.median(found[variant, 1]) / 1e6, 2),
            "machine_gb_per_s": round(max(memory), 2),
        }
    if Variant.INT8 in bench.info.variants:
        pairs = zip(found[Variant.INT8, 1], found[Variant.INT8, GOAL_BATCH], strict=True)
        ratios = [GOAL_BATCH * alone / together for alone, together in pairs]
        name = f"int8_throughput_batch_{GOAL_BATCH}"
        bench.ratio_goal(name, ratios, "times batch 1", least=MIN_BATCH_SPEEDUP)


async def _batch_tpot_ms(bench: ModesBench, variant: Variant, batch: int) -> float:
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


def ttft_ms(line: Timeline) -> float:
    value = line.ttft_ms()
    assert value is not None, "a generation of a benchmark runs to its end"
    return value
